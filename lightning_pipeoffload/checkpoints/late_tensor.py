"""Tensors of a checkpoint's file that come to this process when they are written.

``torch.save`` writes the values after all else, one after the other. So it needs no more than one
of them at a time, wherever they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class LateTensor:
    """Stands for a tensor in what ``torch.save`` is given; it is loaded as any other one.

    Args:
        like: A tensor of the same shape and dtype.
        fetch: A function that returns the value; called once, when it is its turn.
    """

    def __init__(self, like: Tensor, fetch: Callable[[], Tensor]) -> None:
        self._shape = tuple(like.shape)
        self._dtype = like.dtype
        self._storage = torch.UntypedStorage(like.numel() * like.element_size(), device="meta")
        # What torch.save calls for the bytes of a tensor that is on a device.
        self._storage.cpu = lambda: _bytes_of(fetch())  # type: ignore[method-assign]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle what a tensor of this shape would, with the storage of its own."""
        strides = torch.empty(self._shape, device="meta").stride()
        rebuild, arguments = torch.empty(0, dtype=self._dtype).__reduce_ex__(protocol)
        storage, _, _, _, *rest = arguments
        own: Any = self._storage
        if isinstance(storage, torch.storage.TypedStorage):
            own = torch.storage.TypedStorage(wrap_storage=own, dtype=self._dtype, _internal=True)
        return rebuild, (own, 0, self._shape, strides, *rest)


def _bytes_of(value: Tensor) -> torch.UntypedStorage:
    """Return a storage on the host that begins with a tensor's values."""
    value = value.detach().cpu().contiguous()
    return (value.clone() if value.storage_offset() else value).untyped_storage()


def _tag(storage: Any) -> str | None:
    return "cpu" if "cpu" in vars(storage) else None


def _restore(storage: Any, location: str) -> None:
    return None


# Before torch's own, to which a storage without memory is one of the meta device.
torch.serialization.register_package(0, _tag, _restore)
