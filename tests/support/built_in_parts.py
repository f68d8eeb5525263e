"""Modules that make their layers in ``configure_model``, made plainly and in parts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import nn

from lightning_pipeoffload.runtime.making.construction import (
    Blueprint,
    constructing,
    make_blueprint,
)
from lightning_pipeoffload.runtime.shapes.remote_tensor import RemoteTensor
from lightning_pipeoffload.runtime.users_code.tensor_slots import find_slots
from lightning_pipeoffload.schedule import build


class Later(L.LightningModule):
    """Makes its model in ``configure_model``, once."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.make = make
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.make()


def stage_ranks_of(schedule: str, num_ranks: int) -> list[int]:
    plan = build(schedule, num_ranks, 2 * num_ranks)
    return [plan.rank_of(stage) for stage in range(plan.num_stages)]


def generators() -> list[Any]:
    """Return where the global generators are."""
    state = np.random.get_state(legacy=False)
    return [torch.get_rng_state().tolist(), repr(state), random.getstate()]


def make_part(
    make: Callable[[], nn.Module], stage_ranks: Sequence[int], rank: int, **options: Any
) -> tuple[Later, Blueprint]:
    """Make one rank's part."""
    L.seed_everything(5, verbose=False)
    module = Later(make)
    blueprint = make_blueprint(module, module.configure_model, stage_ranks, **options)
    assert blueprint is not None
    local = [stage for stage, owner in enumerate(stage_ranks) if owner == rank]
    with constructing(module, blueprint, local, [f"stage {s}" for s in range(len(stage_ranks))]):
        module.configure_model()
    return module, blueprint


def assert_made_alike(
    make: Callable[[], nn.Module], stage_ranks: Sequence[int], **options: Any
) -> list[Blueprint]:
    """Compare every rank's part with the plain module, to the bit, and the generators after it."""
    L.seed_everything(5, verbose=False)
    plain = Later(make)
    plain.configure_model()
    after = generators()
    expected = {slot.name: slot.tensor for slot in find_slots(plain)}
    found: set[str] = set()
    blueprints = []
    for rank in range(max(stage_ranks) + 1):
        module, blueprint = make_part(make, stage_ranks, rank, **options)
        assert generators() == after
        tensors = {slot.name: slot.tensor for slot in find_slots(module)}
        assert _aliases(tensors) == _aliases(expected)
        for name, tensor in tensors.items():
            _compare(name, tensor, expected[name])
        found |= {name for name, t in tensors.items() if not isinstance(t, RemoteTensor)}
        blueprints.append(blueprint)
    assert found == {*expected}
    return blueprints


def _aliases(tensors: dict[str, torch.Tensor]) -> dict[str, list[str]]:
    return {name: [n for n in tensors if tensors[n] is t] for name, t in tensors.items()}


def _compare(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
    assert found.requires_grad == expected.requires_grad, name
    if not isinstance(found, RemoteTensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
