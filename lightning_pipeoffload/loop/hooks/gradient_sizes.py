"""The exchange of the gradients' sizes, before a hook that may read them."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.runtime.shapes.foreign_tensor import ForeignTensor
from lightning_pipeoffload.runtime.shapes.known_size import KnownSize
from lightning_pipeoffload.runtime.transport import blaming_peers

_ABSENT, _THERE, _MEASURED = range(3)


def share_gradient_sizes(pipeline: Pipeline, group: PipelineGroup) -> None:
    """Tell all ranks the norm and the largest element of each gradient, and whether there is one.

    One message, of three numbers for each parameter of the model. All ranks call it.

    Args:
        pipeline: This rank's part of the module.
        group: The pipeline's processes.
    """
    parameters = list(pipeline.module.parameters())
    table = _measure([_counted_gradient(parameter, group) for parameter in parameters])
    with blaming_peers("lost a rank while comparing gradients"):
        dist.all_reduce(table, group=group.host_group)
    for parameter, (kind, norm, largest) in zip(parameters, table.tolist(), strict=True):
        if isinstance(parameter, ForeignTensor):
            known = KnownSize(norm, largest) if kind == _MEASURED else None
            parameter.know_gradient(kind != _ABSENT, known)


def _counted_gradient(parameter: Tensor, group: PipelineGroup) -> Tensor | None:
    """Return a gradient that is this rank's to measure."""
    is_own = not isinstance(parameter, ForeignTensor) and group.counts(parameter)
    return parameter.grad if is_own else None


def _measure(gradients: list[Tensor | None]) -> Tensor:
    """Return kind, norm and largest element of each, in a table on the host; 0 where there is none.

    By the operation that the user's code would call, and in no other precision: the answer is to be
    the same on every rank, to the bit.
    """
    table = torch.zeros(len(gradients), 3, dtype=torch.float64)
    measured: list[tuple[int, Tensor]] = []
    for place, gradient in enumerate(gradients):
        if gradient is None:
            continue
        table[place, 0] = _THERE
        if gradient.layout is torch.strided and (gradient.is_floating_point()):
            table[place, 0] = _MEASURED
            both = [torch.linalg.vector_norm(gradient, order) for order in (2, math.inf)]
            measured.append((place, torch.stack(both).to(torch.float64)))
    if measured:
        places = [place for place, _ in measured]
        table[places, 1:] = torch.stack([both for _, both in measured]).cpu()
    return table
