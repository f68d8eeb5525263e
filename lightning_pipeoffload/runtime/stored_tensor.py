"""Tensors whose values are read from a file when they are used.

A rank reads few of a checkpoint's entries, but the user's code (``on_load_checkpoint``) may use
any. ``torch.load(mmap=True)`` would suffice for a file; it cannot map a folder of shards, or
weights that are converted while they are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.leaves import map_operands


class StoredTensor(Tensor):
    """A host tensor without memory, which calls ``read`` for its value at each operation.

    An operation that writes to it, or makes a view that may be written, makes it hold its value.
    ``meta`` has its shape and dtype.
    """

    _read: Callable[[], Tensor]
    _kept: Tensor | None

    @staticmethod
    def __new__(cls, meta: Tensor, read: Callable[[], Tensor]) -> StoredTensor:
        # Private: the only way to make a tensor that has a device but no storage.
        tensor: StoredTensor = Tensor._make_wrapper_subclass(cls, meta.shape, dtype=meta.dtype)
        tensor._read = read
        tensor._kept = None
        return tensor

    def value(self) -> Tensor:
        """Return the value, which must not be written."""
        return self._read() if self._kept is None else self._kept

    def materialize(self) -> Tensor:
        """Return the value, and hold it from now on."""
        self._kept = self.value()
        return self._kept

    @property
    def data(self) -> Tensor:
        """The same tensor, detached."""
        return self.materialize().data

    @data.setter
    def data(self, value: Tensor) -> None:
        """Replace the value."""
        self.materialize().data = value

    def numpy(self, *, force: bool = False) -> Any:
        """Return the value as an array."""
        return self.materialize().numpy(force=force)

    def tolist(self) -> Any:
        """Return the value as a list."""
        return self.value().tolist()

    def data_ptr(self) -> int:
        """Return the value's address."""
        return self.materialize().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the value's memory."""
        return self.materialize().untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.value().clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the value."""
        return self.materialize().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: None = None) -> str:  # type: ignore[override]
        return f"StoredTensor({tuple(self.shape)}, {self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run ``func`` on the values."""
        arguments = func._schema.arguments
        shared = {argument.name for argument in arguments if argument.alias_info is not None}
        values = [
            map_operands(_kept_of if argument.name in shared else value_of, value)
            for argument, value in zip(arguments, args, strict=False)
        ]
        options = {
            name: map_operands(_kept_of if name in shared else value_of, value)
            for name, value in (kwargs or {}).items()
        }
        return func(*values, **options)


def value_of(leaf: Any) -> Any:
    """Return the value of a stored tensor; return anything else unchanged."""
    return leaf.value() if isinstance(leaf, StoredTensor) else leaf


def _kept_of(leaf: Any) -> Any:
    return leaf.materialize() if isinstance(leaf, StoredTensor) else leaf


def read_stored(tree: Any) -> Any:
    """Replace the stored tensors in a tree of dicts, lists and tuples with their values."""
    return map_operands(value_of, tree)
