"""Parameters that ``parallelize_module`` divides while ranks make their own parts of a module.

torch scatters each parameter from the first tensor rank. But tensor ranks draw the same values, so
here each keeps its part of its own, and nothing is sent. A parameter without a value, of another
stage, is divided too: a DTensor whose local part is a shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from lightning_pipeoffload.runtime import replaced
from lightning_pipeoffload.runtime.making import ParameterShape
from lightning_pipeoffload.runtime.shapes import ShapeOnly, storage_of


@contextmanager
def sharding_without_scatter(have_equal_values: bool) -> Iterator[None]:
    """Within the context, have tensor ranks divide parameters without sending values.

    Args:
        have_equal_values: Whether all tensor ranks have the same values. Else torch sends those of
            the first one, and only parameters without values are divided here.
    """
    # Private: distribute_tensor calls them, under whichever name that was imported.
    of_shard = _without_sending(Shard._make_shard_tensor, have_equal_values)
    of_replicate = _without_sending(Replicate._make_replicate_tensor, have_equal_values)
    with (
        replaced(Shard, "_make_shard_tensor", of_shard),
        replaced(Replicate, "_make_replicate_tensor", of_replicate),
    ):
        yield


def _without_sending(make: Callable[..., Tensor], have_equal_values: bool) -> Any:
    def part_of(*args: Any, **kwargs: Any) -> Tensor:
        whole = next(each for each in args if isinstance(each, Tensor))
        if isinstance(whole, ShapeOnly):
            return _shape_of_part(make(*args[:-1], None, **kwargs), whole)
        if not have_equal_values:
            return make(*args, **kwargs)
        part = make(*args[:-1], None, **kwargs)
        # A part that is a view would keep the memory of the whole.
        return part.clone() if storage_of(part).nbytes() > part.nbytes else part

    return staticmethod(part_of)


def _shape_of_part(part: Any, whole: ShapeOnly) -> Tensor:
    meta = torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device="meta")
    return ParameterShape(meta, whole.device, whole.origins)
