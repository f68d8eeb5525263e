"""The origin :data:`.OF_SHARD` of tensors without values that differ between tensor ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_pipeoffload.runtime import replaced
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.shapes.sharding import OF_SHARD

_from_local, _to_local = DTensor.from_local, DTensor.to_local


@contextmanager
def recording_shards() -> Iterator[None]:
    """Within the context, add :data:`.OF_SHARD` to shape-only tensors that come from a DTensor.

    Patches ``DTensor.from_local`` and ``to_local``, only in a trace, since a compiler supports only
    torch's own functions.
    """
    with (
        replaced(DTensor, "from_local", staticmethod(_from_local_with_origin)),
        replaced(DTensor, "to_local", _to_local_with_origin),
    ):
        yield


def _from_local_with_origin(*args: Any, **kwargs: Any) -> DTensor:
    tensor = _from_local(*args, **kwargs)
    _set_origin(tensor._local_tensor, tensor)
    return tensor


def _to_local_with_origin(self: DTensor, **kwargs: Any) -> Tensor:
    local = _to_local(self, **kwargs)
    _set_origin(local, self)
    return local


def _set_origin(local: Tensor, of: DTensor) -> None:
    if isinstance(local, ShapeOnly):
        is_same = all(placement.is_replicate() for placement in of.placements)
        local.origins = local.origins - OF_SHARD if is_same else local.origins | OF_SHARD
