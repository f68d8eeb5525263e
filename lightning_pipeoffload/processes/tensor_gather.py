"""The value of a parameter, buffer or gradient on every rank, whichever has it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from lightning_pipeoffload.runtime.comm import reporting_lost_peers
from lightning_pipeoffload.runtime.run import Pipeline
from lightning_pipeoffload.runtime.shapes import ShapeOnly, Sharding, sharding_of
from lightning_pipeoffload.runtime.tensor_parallel import gather_whole
from lightning_pipeoffload.runtime.users_code import find_slots


def gather_tensor(pipeline: Pipeline, tensor: Tensor) -> Tensor:
    """Return a copy of a parameter, buffer or gradient on every rank; all ranks call it.

    Of a layer that tensor ranks share it is the whole tensor.

    Raises:
        ValueError: The tensor is no parameter, buffer or gradient, or ranks pass different ones.
    """
    group = pipeline.group
    found = ((name, of) for name, candidate, of in _tensors_of(pipeline) if candidate is tensor)
    name, sharding = next(found, ("", None))
    has_value = bool(name) and not isinstance(tensor, ShapeOnly)
    ranks = pipeline.gradients.group_with_all_gradients
    asked = ranks.gather((name, has_value, group.global_rank))
    _check_alike([each for each, *_ in asked], tensor)
    owner = next(rank for _, has, rank in asked if has)
    with reporting_lost_peers("lost a rank while gathering a tensor"):
        copied = group.broadcast_to_hosts(tensor, owner, ranks)
    if sharding is not None and sharding.is_divided:
        copied = gather_whole(copied, sharding)
    return copied.to(tensor.device)


def _tensors_of(pipeline: Pipeline) -> Iterator[tuple[str, Tensor | None, Sharding | None]]:
    for slot in find_slots(pipeline.module):
        sharding = sharding_of(slot.tensor)
        yield slot.name, slot.tensor, sharding
        if slot.kind == "_parameters":
            yield f"{slot.name}.grad", slot.tensor.grad, sharding


def _check_alike(names: list[str], tensor: Tensor) -> None:
    if not all(names):
        raise ValueError(
            f"trainer.strategy.gather() was given a tensor of shape {tuple(tensor.shape)} that is "
            f"no parameter, buffer or gradient of the module; give it the parameter itself, not "
            f"what was computed from it"
        )
    if len(set(names)) > 1:
        raise ValueError(
            f"the ranks ask trainer.strategy.gather() for different tensors, {', '.join(names)}; "
            f"call it in the same order on all of them"
        )
