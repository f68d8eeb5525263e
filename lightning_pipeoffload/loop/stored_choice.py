"""The choice of an earlier start of the same run, with the costs that it was made by.

Another start traces the microbatches of that choice only, plans it under its own limits, and
measures nothing. It is the same run where the batch's shapes, the parameters, the settings,
optimizers, precision, versions and all ranks' devices are the same, by which the choice is found,
and, once a microbatch was traced, the blocks and the step's operations.
"""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from typing import Any

import torch
from torch import nn

from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.runtime.batch import shape_signature
from lightning_pipeoffload.runtime.cut import StepRecord
from lightning_pipeoffload.runtime.device import Device
from lightning_pipeoffload.runtime.measure import ActionOverhead
from lightning_pipeoffload.runtime.run import Pipeline
from lightning_pipeoffload.schedule import Costs, PlanCache, PlanOption, write_and_prune

log = logging.getLogger(__name__)

_NO_SETTINGS = {"plan_cache", "solver_seconds"}


@dataclass(frozen=True)
class StoredChoice:
    """A choice.

    Attributes:
        option: What was chosen.
        work: A digest of the blocks and of the operations of its microbatches.
        costs: The costs of its blocks.
        overhead: The overhead of an action in addition to them.
        num_classes: The number of classes of alike blocks.
        bytes_without_activations: What each process's device has held apart from activations.
        slowness: How much slower some devices are; see :class:`.Devices`.
    """

    option: PlanOption
    work: str
    costs: Costs
    overhead: ActionOverhead
    num_classes: int
    bytes_without_activations: Sequence[int]
    slowness: Sequence[float] = ()

    @property
    def measured(self) -> tuple[Costs, ActionOverhead]:
        return self.costs, self.overhead

    @classmethod
    def read(cls, text: str) -> StoredChoice:
        values = json.loads(text)
        option, costs = PlanOption(**values.pop("option")), Costs(**values.pop("costs"))
        return cls(option=option, costs=costs, **values)


class ChoiceStore:
    """The file of one run's choice; all ranks call its methods.

    Attributes:
        path: The file.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        pipeline: Pipeline,
        batch: Any,
        conditions: Sequence[Any],
    ) -> None:
        group = self._group = pipeline.group
        trainer: Any = pipeline.module.trainer
        described = (
            *([field.name for field in fields(StoredChoice)],),
            *(type(pipeline.module).__qualname__, _describe_parameters(pipeline.module)),
            *(shape_signature(batch),),
            *([*map(_name_of, trainer.optimizers)], trainer.precision),
            *(_describe_settings(settings), pipeline.settings.stage_ranks, conditions),
            *(torch.__version__, _nodes_as_numbers(group.world.gather(_device(pipeline.device)))),
        )
        digest = sha256(repr(described).encode()).hexdigest()[:24]
        self.path = PlanCache(settings.plan_cache).folder / f"choice-{digest}.json"

    def find(self) -> StoredChoice | None:
        """Return the choice; None if there is none."""
        return self._group.world.broadcast(self._read() if self._group.is_global_zero else None, 0)

    def _read(self) -> StoredChoice | None:
        try:
            return StoredChoice.read(self.path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("the choice in %s is damaged, and is ignored: %s", self.path, error)
            return None

    def store(self, choice: StoredChoice) -> None:
        """Keep a choice for another start."""
        if self._group.is_global_zero:
            write_and_prune(self.path, json.dumps(asdict(choice)), "choice-*.json")


def digest_work(blocks: str, record: StepRecord) -> str:
    """Return a digest of how blocks are made, and of a step's operations, shapes and numbers."""
    return sha256(repr((blocks, record.work.digests)).encode()).hexdigest()


def _describe_parameters(module: nn.Module) -> list[tuple[Any, ...]]:
    # Not the blocks: those that a step calls are not known before its trace.
    return [(name, *p.shape, p.dtype) for name, p in module.named_parameters()]


def _name_of(optimizer: Any) -> str:
    kind = type(getattr(optimizer, "optimizer", optimizer))
    return f"{kind.__module__}.{kind.__qualname__}"


def _describe_settings(settings: PipelineSettings) -> list[tuple[str, str]]:
    values = ((field.name, getattr(settings, field.name)) for field in fields(settings))
    return [
        (name, getattr(value, "__qualname__", repr(value)))
        for name, value in values
        if name not in _NO_SETTINGS
    ]


def _device(device: torch.device) -> tuple[Any, ...]:
    """Describe this process's device, its processor and, last, its node."""
    name, _, node, num_bytes = Device.of(device)
    processor = platform.machine(), os.cpu_count(), torch.get_num_threads()
    return name, num_bytes, *processor, node


def _nodes_as_numbers(ranks: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Replace the nodes' names, which differ in each job, by which ranks share one."""
    nodes: dict[Any, int] = {}
    return [(*rank[:-1], nodes.setdefault(rank[-1], len(nodes))) for rank in ranks]
