"""Sends the values of a checkpoint file to global rank 0 as it writes them, small ones together.

Every rank makes a checkpoint with the values that it owns and shapes of the others, since hooks
read and change it. ``torch.save`` writes the structure first, then the bytes of each tensor::

    global rank 0   structure | own 0 | asks for 1 | own 2 | asks for 3 | done
    rank 1                            | sends 1                         | goes on
    rank 2, other replica                                  | sends 3    | goes on
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import (  # private: see runtime/leaves
    KeyPath,
    keystr,
    tree_flatten_with_path,
    tree_map_with_path,
    tree_unflatten,
)

from lightning_pipeoffload.checkpoints.file import copy_state_dict_metadata
from lightning_pipeoffload.runtime import StoredTensor, value_of
from lightning_pipeoffload.runtime.comm import PipelineGroup, as_bytes, reporting_lost_peers
from lightning_pipeoffload.runtime.shapes import ShapeOnly

_DONE = -1
_BUNDLE = 4 << 20  # bytes of small values that come together: each answer takes two messages


def to_shape_only(tree: Any, global_rank: int) -> Any:
    """Replace the tensors of a pytree with shapes, whose origins name ``global_rank``."""
    host = torch.device("cpu")

    def shape(path: KeyPath, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        name = ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
        meta = leaf.meta if isinstance(leaf, ShapeOnly) else leaf.to("meta")
        return ShapeOnly(meta, host, frozenset((f"{name} (on global rank {global_rank})",)))

    return tree_map_with_path(shape, tree)


def picklable_shapes(entries: dict[Any, Any], global_rank: int, name: str = "") -> dict[Any, Any]:
    """Return the shapes of :func:`to_shape_only` for a pickle, made in a fifth of the time."""
    shapes: dict[Any, Any] = type(entries)()
    for key, value in entries.items():
        path = f"{name}.{key}" if name else str(key)
        if type(value) in (dict, OrderedDict):
            shapes[key] = picklable_shapes(value, global_rank, path)
        elif type(value) in (Tensor, nn.Parameter, DTensor) and value.layout is torch.strided:
            origin = f"{path} (on global rank {global_rank})"
            shapes[key] = _PickledShape(tuple(value.shape), value.stride(), value.dtype, origin)
        else:
            shapes[key] = to_shape_only({path: value}, global_rank)[path]
    return shapes


class _PickledShape:
    """Becomes a ShapeOnly where it is read from a pickle."""

    def __init__(self, *properties: Any) -> None:
        self._properties = properties

    def __reduce__(self) -> Any:
        return _make_shape, self._properties


def _make_shape(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, origin: str
) -> ShapeOnly:
    meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return ShapeOnly(meta, torch.device("cpu"), frozenset((origin,)))


class CheckpointGatherer:
    """The values of one checkpoint; all ranks of all replicas make it together.

    Args:
        checkpoint: This rank's checkpoint; it is not changed, since callbacks may use it.
        group: This process's groups.

    Raises:
        RuntimeError: A value is on no rank; all ranks raise it.
    """

    def __init__(self, checkpoint: dict[str, Any], group: PipelineGroup) -> None:
        self._checkpoint = checkpoint
        self._group = group
        leaves, self._structure = tree_flatten_with_path(checkpoint)
        self._leaves = [leaf for _, leaf in leaves]
        paths = [path for path, leaf in leaves if isinstance(leaf, ShapeOnly)]
        absent: list[KeyPath] = group.world.broadcast(paths, 0)
        place = {path: index for index, (path, _) in enumerate(leaves)} if absent else {}
        self._absent = [place.get(path) for path in absent]  # among the leaves
        numbers = group.world.gather(self._number_values()) if absent else []
        replica = group.first_replica_ranks
        ranks = [*replica, *(rank for rank in range(group.world_size) if rank not in replica)]
        self._owners = [
            _owner(path, {rank: numbers[rank][index] for rank in ranks})
            for index, path in enumerate(absent)
        ]
        self._numbers: dict[int, list[int]] = {}  # by owner, in the order of the file
        for owner, number in dict.fromkeys(self._owners):
            self._numbers.setdefault(owner, []).append(number)
        self._in_hand: dict[tuple[int, int], Tensor] = {}

    def _number_values(self) -> list[int | None]:
        """Number this rank's values that are absent on rank 0; tied names share a number."""
        numbers: dict[Any, int] = {}
        leaves = [self._absent_leaf(number) for number in range(len(self._absent))]
        return [
            numbers.setdefault(_storage_key(leaf), index)
            if isinstance(leaf, Tensor) and not isinstance(leaf, ShapeOnly)
            else None
            for index, leaf in enumerate(leaves)
        ]

    def _absent_leaf(self, number: int) -> Any:
        place = self._absent[number]
        return None if place is None else self._leaves[place]

    @contextmanager
    def checkpoint_with_values(self, one_by_one: bool) -> Iterator[dict[str, Any]]:
        """Yield the checkpoint; on global rank 0 with all values, which others send at the end.

        Args:
            one_by_one: Whether to send a value when ``torch.save`` writes it; else send all now.
        """
        owners = sorted({rank for rank, _ in self._owners} - {0})
        if self._group.global_rank in owners:
            yield self._checkpoint
            self._serve_requests()
        elif self._group.global_rank:
            yield self._checkpoint
        else:
            try:
                yield self._with_values(one_by_one)
            finally:
                for rank in owners:
                    self._request(_DONE, rank)

    def _with_values(self, one_by_one: bool) -> dict[str, Any]:
        fetches: dict[int, tuple[Any, Callable[[], Tensor]]] = {}
        for place, leaf in enumerate(self._leaves):
            if _needs_host_copy(leaf):
                fetches[place] = _storage_key(leaf), partial(_on_host, leaf)
        # All into the same memory, one after the other: separate allocations would fragment it.
        largest = max(map(self._size, range(len(self._absent))), default=0)
        room = torch.empty(largest if one_by_one else 0, dtype=torch.uint8)
        for number, (owner, first) in enumerate(self._owners):
            index = self._absent[number]
            assert index is not None  # as this is global rank 0
            receive = partial(self._receive, self._leaves[index], owner, first, room)
            fetches[index] = (owner, first), receive
        fetched: dict[Any, Any] = {}
        leaves = [*self._leaves]
        for place, (key, fetch) in sorted(fetches.items()):
            if key not in fetched:
                fetched[key] = DeferredTensor(leaves[place], fetch) if one_by_one else fetch()
            leaves[place] = fetched[key]
        return copy_state_dict_metadata(tree_unflatten(leaves, self._structure), self._checkpoint)

    def _receive(self, like: Tensor, owner: int, number: int, room: Tensor) -> Tensor:
        if (owner, number) not in self._in_hand:
            bundle = self._bundle(owner, number)
            sizes = [self._size(each) for each in bundle]
            room = room if room.numel() and len(bundle) == 1 else torch.empty(0, dtype=torch.uint8)
            room = room[: sizes[0]] if room.numel() else room.new_empty(sum(sizes))
            with reporting_lost_peers(f"lost global rank {owner} while writing a checkpoint"):
                self._request(number, owner, len(bundle))
                dist.recv(room, owner, group=self._group.world.host_group)
            if len(bundle) == 1:
                return room.view(like.dtype).view(like.shape)
            parts = room.split(sizes)
            self._in_hand.update(((owner, n), p) for n, p in zip(bundle, parts, strict=True))
        # A copy, which is aligned.
        return self._in_hand.pop((owner, number)).clone().view(like.dtype).view(like.shape)

    def _bundle(self, owner: int, number: int) -> list[int]:
        """Return the numbers of the values that come with one: those after it, if they are small.

        Each value is asked for once, in this order but for what hooks of the file change.
        """
        numbers, size = self._numbers[owner], 0
        bundle: list[int] = []
        for each in numbers[numbers.index(number) :]:
            size += self._size(each)
            if bundle and (size > _BUNDLE or (owner, each) in self._in_hand):
                break
            bundle.append(each)
        return bundle

    def _size(self, number: int) -> int:
        size: int = self._absent_leaf(number).nbytes
        return size

    def _request(self, number: int, rank: int, count: int = 0) -> None:
        dist.send(torch.tensor([number, count]), rank, group=self._group.world.host_group)

    def _serve_requests(self) -> None:
        asked = torch.empty(2, dtype=torch.int64)
        group, numbers = self._group.world.host_group, self._numbers[self._group.global_rank]
        with reporting_lost_peers("lost global rank 0 while it wrote a checkpoint"):
            while True:
                dist.recv(asked, 0, group=group)
                number, count = asked.tolist()
                if number == _DONE:
                    return
                first = numbers.index(number)
                values = [self._bytes_of(each) for each in numbers[first : first + count]]
                dist.send(values[0] if count == 1 else torch.cat(values), 0, group=group)

    def _bytes_of(self, number: int) -> Tensor:
        return as_bytes(_on_host(self._absent_leaf(number)).contiguous())


class DeferredTensor:
    """Replaces a tensor in the argument of ``torch.save``; the file contains a normal tensor.

    Args:
        like: A tensor of the same shape and dtype.
        fetch: A function that returns the value; called once, when its bytes are written.
    """

    def __init__(self, like: Tensor, fetch: Callable[[], Tensor]) -> None:
        self._shape = tuple(like.shape)
        self._dtype = like.dtype
        self._storage = torch.UntypedStorage(like.numel() * like.element_size(), device="meta")
        # torch.save calls it for the bytes of a tensor on a device.
        self._storage.cpu = lambda: _bytes_of(fetch())  # type: ignore[method-assign]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a tensor of this shape, with the late storage."""
        strides = torch.empty(self._shape, device="meta").stride()
        rebuild, arguments = torch.empty(0, dtype=self._dtype).__reduce_ex__(protocol)
        storage, _, _, _, *rest = arguments
        late_storage: Any = self._storage
        if isinstance(storage, torch.storage.TypedStorage):
            late_storage = torch.storage.TypedStorage(
                wrap_storage=late_storage, dtype=self._dtype, _internal=True
            )
        return rebuild, (late_storage, 0, self._shape, strides, *rest)


def _bytes_of(value: Tensor) -> torch.UntypedStorage:
    """Return a storage on the host that begins with a tensor's values."""
    value = value.detach().cpu().contiguous()
    return (value.clone() if value.storage_offset() else value).untyped_storage()


def _device_of_storage(storage: Any) -> str | None:
    return "cpu" if "cpu" in vars(storage) else None


def _leave_to_torch(storage: Any, location: str) -> None:
    return None


# Before torch's own, which treats a storage without memory as one of the meta device.
torch.serialization.register_package(0, _device_of_storage, _leave_to_torch)


def _on_host(leaf: Tensor) -> Tensor:
    value: Tensor = value_of(leaf).detach().cpu()
    return value


def _needs_host_copy(leaf: Any) -> bool:
    """Return whether a tensor's value is not in this process's host memory."""
    if (
        not isinstance(leaf, Tensor)
        or isinstance(leaf, ShapeOnly)
        or leaf.layout is not torch.strided
    ):
        return False
    return isinstance(leaf, StoredTensor) or leaf.device.type != "cpu"


def _storage_key(leaf: Any) -> Any:
    """Return a key that is equal for all names of one tensor, such as a tied weight."""
    if isinstance(leaf, StoredTensor) or leaf.layout is not torch.strided or not leaf.numel():
        return id(leaf)
    return leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride()


def _owner(path: KeyPath, on_rank: dict[int, int | None]) -> tuple[int, int]:
    """Return the first global rank that has a value, and the value's number there."""
    for rank, number in on_rank.items():
        if number is not None:
            return rank, number
    raise RuntimeError(
        f"the checkpoint was not saved: checkpoint{keystr(path)} has a value on no rank; save only "
        f"values that a rank has computed from its own part of the module"
    )
