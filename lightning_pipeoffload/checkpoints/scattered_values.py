"""Values of a checkpoint that are on several ranks, brought to the one that writes it.

Each rank has its own part of the module and of the optimizers' states, and a callback that averages
weights the average of that part. Global rank 0, which writes, has shapes in place of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.transport import blaming_peers

_Place = tuple[Any, ...]


def bring_values(
    checkpoint: dict[str, Any], group: PipelineGroup, ready: Collection[str] = ()
) -> None:
    """Let global rank 0's checkpoint have the values that others have in the same place.

    All ranks call it; one tensor after another comes to global rank 0. What a callback has given is
    left as it is: it may be in use.

    Args:
        checkpoint: This rank's checkpoint, or a part of it.
        group: The pipeline's processes.
        ready: Keys of the checkpoint whose values are as they are to be.

    Raises:
        RuntimeError: No rank has a value; all of them raise it.
    """
    rest = {key: value for key, value in checkpoint.items() if key not in ready}
    mine = dict(_leaves(rest))
    absent = [place for place, value in mine.items() if isinstance(value, ShapeOnly)]
    places: list[_Place] = group.broadcast(absent, group.root)
    if not places:
        return
    have = group.gather([_has_value(mine.get(place)) for place in places])
    values = {}
    with blaming_peers("lost a rank while bringing a checkpoint together"):
        for place, on_rank in zip(places, zip(*have, strict=True), strict=True):
            owner = _owner(place, on_rank, group)
            values[place] = group.bring(mine.get(place), owner)
    if group.is_root:
        checkpoint.update(_with_values(rest, values))


def shapes_of(tree: Any, global_rank: int) -> Any:
    """Return a state, nested as it may be, without its values, which are on ``global_rank``."""
    host = torch.device("cpu")

    def shape(place: _Place, tensor: Tensor) -> Tensor:
        name = ".".join(map(str, place))
        origin = frozenset((f"{name} (on global rank {global_rank})",))
        return ShapeOnly(tensor.to("meta"), host, origin)

    return _map_tensors(shape, tree)


def on_host(tree: Any) -> Any:
    """Return a state, nested as it may be, with its tensors on the host."""
    return _map_tensors(lambda place, tensor: tensor.cpu(), tree)


def _map_tensors(function: Callable[[_Place, Tensor], Tensor], tree: Any) -> Any:
    leaves = ((place, leaf) for place, leaf in _leaves(tree) if isinstance(leaf, Tensor))
    return _with_values(tree, {place: function(place, leaf) for place, leaf in leaves})


def _has_value(found: Any) -> bool:
    return isinstance(found, Tensor) and not isinstance(found, ShapeOnly)


def _owner(place: _Place, has_value: Sequence[bool], group: PipelineGroup) -> int:
    if not any(has_value):
        name = "".join(f"[{key!r}]" for key in place)
        raise RuntimeError(
            f"the checkpoint was not saved: checkpoint{name} has a value on no rank; save what a "
            f"rank has computed from its own part of the module only"
        )
    return group.global_ranks[has_value.index(True)]


def _leaves(tree: Any, place: _Place = ()) -> Iterator[tuple[_Place, Any]]:
    for key, value in _entries(tree):
        if isinstance(value, (Mapping, list, tuple)):
            yield from _leaves(value, (*place, key))
        else:
            yield (*place, key), value


def _entries(tree: Any) -> Iterable[tuple[Any, Any]]:
    return tree.items() if isinstance(tree, Mapping) else enumerate(tree)


def _with_values(tree: Any, values: Mapping[_Place, Any], place: _Place = ()) -> Any:
    """Return a tree with other values in some places; what has none of them is the same object."""
    if place in values:
        return values[place]
    if not isinstance(tree, (Mapping, list, tuple)):
        return tree
    entries = [(key, old, _with_values(old, values, (*place, key))) for key, old in _entries(tree)]
    changed = {key: new for key, old, new in entries if new is not old}
    if not changed:
        return tree
    if isinstance(tree, tuple):
        members = [new for _, _, new in entries]
        return type(tree)(*members) if hasattr(tree, "_fields") else tuple(members)
    made: Any = copy(tree)
    for key, new in changed.items():
        made[key] = new
    return made
