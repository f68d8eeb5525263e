"""LBFGS over the ranks of a pipeline: each takes its part of the step that one device would take.

Its direction comes from products of whole gradients, and how often it evaluates from the loss; a
rank that went by its own part would go another way, and leave the others waiting. So every rank's
optimizer gets the gradient of all parameters, in their order, and keeps the whole history.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import LBFGS

from lightning_pipeoffload.collectives import PipelineGroup
from lightning_pipeoffload.runtime.payload import TensorSpec
from lightning_pipeoffload.runtime.transport import blaming_peers


class WholeGradient:
    """What one rank's LBFGS sees and moves in place of its own parameters.

    Args:
        specs: of the model's parameters that are optimized, in order.
        own: this rank's parameters.
        group: the pipeline's processes.
    """

    def __init__(
        self, specs: Mapping[str, TensorSpec], own: Mapping[str, Tensor], group: PipelineGroup
    ) -> None:
        self._group = group
        self._dtype = next(iter(specs.values())).dtype
        self._places: list[tuple[Tensor, slice]] = []
        self.size = 0
        for name, spec in specs.items():
            start, self.size = self.size, self.size + spec.shape.numel()
            if name in own:
                self._places.append((own[name], slice(start, self.size)))

    @property
    def parameters(self) -> list[Tensor]:
        """This rank's parameters, in the order of the model; one stands in where there are none."""
        return [parameter for parameter, _ in self._places] or [torch.zeros(0)]

    def gather(self) -> Tensor:
        """Return the gradients of all ranks in one row."""
        row = torch.zeros(self.size, dtype=self._dtype, device=self._group.device)
        for parameter, place in self._places:
            if parameter.grad is not None and self._group.counts(parameter):
                row[place] = parameter.grad.flatten()
        with blaming_peers("lost a rank while gathering gradients"):
            dist.all_reduce(row)
        return row

    def move(self, step_size: float, direction: Tensor) -> None:
        """Move this rank's parameters by their part of a direction."""
        for parameter, place in self._places:
            parameter.add_(direction[place].view_as(parameter), alpha=step_size)


def join_lbfgs(optimizer: LBFGS, whole: WholeGradient) -> None:
    """Let a rank's optimizer see the whole gradient.

    Args:
        optimizer: of the rank's parameters, or still of the whole model's.
        whole: of the pipeline.
    """
    # Private, as all below: its history is with this one.
    state = optimizer.state.pop(optimizer._params[0], None)
    optimizer._params = whole.parameters
    if state is not None:
        optimizer.state[optimizer._params[0]] = state
    optimizer._numel_cache = whole.size  # type: ignore[assignment]
    optimizer._gather_flat_grad = whole.gather  # type: ignore[method-assign]
    optimizer._add_grad = whole.move  # type: ignore[assignment,method-assign]


def give_history(
    state: Mapping[str, Any], names: Sequence[str], own: Container[str]
) -> dict[str, Any]:
    """Return a saved state in which the rank's first parameter has the history.

    Args:
        state: of the whole model's LBFGS, which keeps it with the first parameter.
        names: of the model's parameters that are optimized, in order.
        own: those of this rank.
    """
    places = (place for place, name in enumerate(names) if name in own)
    keys = state["param_groups"][0]["params"]  # numbers, or names in a checkpoint that is a folder
    history = state["state"].get(keys[0])
    return {**state, "state": {keys[next(places, 0)]: history} if history else {}}
