"""Finds blocks that modify their arguments: later stages do not run the block, and miss the change.

A block that modifies a list or dict, or in an object a number or the length of a list, runs on
shape-only tensors on later stages too, and tensors that it puts there become carried values. A
block that writes in place into a tensor argument is refused if the tensor is read afterwards, and
if each stage has that tensor itself: it is a constant or a tensor of the batch. A tensor computed
from weights is sent to later stages after the write, so they get the written values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten  # private: see runtime/leaves

from lightning_pipeoffload.runtime import tensors_in
from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.shapes import ShapeOnly, storage_key
from lightning_pipeoffload.runtime.users_code import running_user_line

_NUMBERS = {type(None), bool, int, float, str}
_DEPTH = 3  # of objects in attributes: a cache has layers, which have lists


class ArgumentWrite(NamedTuple):
    """A tensor that a block gets as an argument, and writes in place."""

    block: int
    argument: str
    line: str  # of the user's code that calls the block


class _Attributes(NamedTuple):
    """Attributes of an object, which later blocks may ask for, such as the length of a list.

    Tensors are found where they are used. So a layer of a cache that is filled counts only once its
    tensors are read: what else it notes, such as that it is filled, goes with these.
    """

    is_nested: bool
    forms: list[Any]  # of lists and dicts
    others: list[Any]  # names and numbers
    tensors: list[Tensor]

    def are_same(self, was: _Attributes) -> bool:
        is_filled = [*map(id, self.tensors)] != [*map(id, was.tensors)]
        is_same = self.others == was.others or (self.is_nested and is_filled)
        return is_same and self.forms == was.forms


class _State(NamedTuple):
    spec: Any
    leaves: list[Any]
    versions: list[tuple[Tensor, int]]
    attributes: list[_Attributes]  # of objects


class ArgumentWatch:
    """Compares the arguments of each block before and after its call.

    Args:
        chain: The blocks.
        writes: The writes into tensors that are read after the call; filled.

    Attributes:
        blocks_filling_arguments: The indices of blocks that have modified a list, a dict, or an
            object's attributes other than tensors and what a filled part of a cache notes of them.
    """

    def __init__(self, chain: BlockChain, writes: list[ArgumentWrite]) -> None:
        self._chain, self._writes = chain, writes
        self.blocks_filling_arguments: set[int] = set()
        self._written: dict[int, tuple[ArgumentWrite, int]] = {}  # by the tensor's memory
        self._before: list[_State] = []

    def snapshot_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the state of a block's arguments."""
        self._before = [_state_of(value) for value in (*args, *kwargs.values())]

    def compare_arguments(
        self, block: int, call: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Record the arguments that a call of a block has changed."""
        values = (*args, *kwargs.values())
        for place, (value, was) in enumerate(zip(values, self._before, strict=True)):
            written = [tensor for tensor, version in was.versions if tensor._version != version]
            if written:
                forward = self._chain.blocks[block].forward
                name = [*_names(forward, len(args)), *kwargs][place]
                write = ArgumentWrite(block, name, running_user_line())
                self._written.update((storage_key(tensor), (write, call)) for tensor in written)
            if not _is_same(_state_of(value), was):
                self.blocks_filling_arguments.add(block)

    def record_write_if_read(self, args: tuple[Any, ...], num_calls: int) -> None:
        """Record a write into a tensor that an operation reads after the writing call has ended."""
        for tensor in tensors_in(args) if self._written else ():
            write, call = self._written.get(storage_key(tensor), (None, num_calls))
            if write is not None and call < num_calls:
                self._writes.append(write)
                del self._written[storage_key(tensor)]


def _state_of(value: Any) -> _State:
    leaves, spec = tree_flatten(value)
    real = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, ShapeOnly)]
    # Private: counts writes. Inference tensors count none.
    versions = [(leaf, leaf._version) for leaf in real if not leaf.is_inference()]
    return _State(spec, leaves, versions, [*_attributes_of(leaves)])


def _attributes_of(leaves: list[Any], depth: int = 1) -> Iterator[_Attributes]:
    for leaf in leaves:
        if isinstance(leaf, (Tensor, nn.Module, type)) or not hasattr(leaf, "__dict__"):
            continue
        parts, _ = tree_flatten(vars(leaf))
        specs = (tree_flatten(value)[1] for value in vars(leaf).values())
        forms = [spec for spec in specs if not spec.is_leaf()]
        others = [*vars(leaf), *(part for part in parts if type(part) in _NUMBERS)]
        tensors = [part for part in parts if isinstance(part, Tensor)]
        yield _Attributes(depth > 1, forms, others, tensors)
        if depth < _DEPTH:
            yield from _attributes_of(parts, depth + 1)


def _is_same(now: _State, was: _State) -> bool:
    if now.spec != was.spec or [*map(id, now.leaves)] != [*map(id, was.leaves)]:
        return False
    objects, before = now.attributes, was.attributes
    return len(objects) == len(before) and all(map(_Attributes.are_same, objects, before))


def _names(forward: Callable[..., Any], count: int) -> Iterator[str]:
    """Yield the names of the first arguments by position."""
    parameters = [*inspect.signature(forward).parameters]
    for place in range(count):
        yield parameters[place] if place < len(parameters) else f"{place + 1}"
