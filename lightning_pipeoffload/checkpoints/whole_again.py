"""Brings a module together that an earlier pipeline over the same ranks has left in parts."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_pipeoffload.runtime.cut.remote_values import (
    absent_in,
    explain_absent,
    make_real,
    settle,
)
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.transport import blaming_peers
from lightning_pipeoffload.runtime.users_code.tensor_slots import find_slots


def make_whole(module: nn.Module, group: PipelineGroup) -> None:
    """Give every rank what others have of a module; all ranks call it.

    Args:
        module: The user's module.
        group: The pipeline's processes.

    Raises:
        RuntimeError: No rank has a tensor of the module.
    """
    absent = {slot.name: slot for slot in absent_in(module)}
    absent_on = group.gather(list(absent))
    missing = [name for name in absent if all(name in names for names in absent_on)]
    if missing:
        raise RuntimeError(explain_absent(module))
    made: dict[int, Tensor] = {}
    present = {slot.name: slot.tensor for slot in find_slots(module)}
    for name in sorted({name for names in absent_on for name in names}):
        places = zip(group.global_ranks, absent_on, strict=True)
        source = min(rank for rank, names in places if name not in names)
        tensor = make_real(absent[name], made) if name in absent else present[name]
        with blaming_peers("lost a rank while bringing the module together"):
            tensor.detach().copy_(group.bring_to_all(tensor, source))
    settle(module)
