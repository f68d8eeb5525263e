"""The parts of a batch: their weights, their checksums and shapes, and merging of their results."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from functools import reduce
from numbers import Complex, Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipeoffload.runtime import late_values
from lightning_pipeoffload.runtime.batch.structure import has_entry_for_each
from lightning_pipeoffload.runtime.batch.tree import (
    batch_leaves,
    container_entries,
    is_column,
    rebuild,
    tensors_of_object,
)

_PRIME = 1_000_003
_WHOLE = (Integral, np.bool_)


def compute_microbatch_shares(
    weigh: Callable[[Any], Any], parts: Sequence[Any]
) -> tuple[Sequence[Any], Any, Callable[[], None]]:
    """Return each microbatch's share of the sum of the user's weights, and that sum.

    These are tensors where the weights are on an accelerator. Also returned is a function that
    checks the weights, once reading them does not make the host wait.
    """
    returned = [weigh(part) for part in parts]
    if not any(map(late_values.is_on_accelerator, returned)):
        weights = _as_numbers(returned)
        _check_weights(weights, returned)
        total: Any = sum(weights)
        return [weight / total for weight in weights], total, lambda: None
    on_device = next(filter(late_values.is_on_accelerator, returned)).device
    stacked = torch.stack([torch.as_tensor(w, device=on_device).double() for w in returned])
    read = late_values.start_host_copy(stacked)
    total = stacked.sum()
    return (stacked / total).unbind(), total, lambda: _check_weights(read().tolist(), returned)


def _as_numbers(returned: Sequence[Any]) -> list[float]:
    try:
        return [float(weight) for weight in returned]
    except (TypeError, ValueError):
        return [math.nan]


def _check_weights(weights: Sequence[float], returned: Sequence[Any]) -> None:
    if not (min(weights) >= 0 and 0 < sum(weights) < math.inf):
        raise ValueError(
            f"microbatch_weight returned {returned} for the microbatches of a batch; it must "
            f"return numbers from 0 up, of which one is positive"
        )


def weighted(value: Any, share: Any) -> Any:
    """Return a number times its share, which may be a tensor, in the number's own precision."""
    product = value * share
    if not isinstance(value, Tensor) or product.dtype == value.dtype:
        return product
    is_precise = value.is_floating_point() or value.is_complex()
    return product.to(value.dtype) if is_precise else product


def weighted_or_zero(value: Any, share: Any) -> Any:
    """Return a number times its share; 0 where the share is 0, as a mean over no tokens is NaN."""
    product = weighted(value, share)
    if isinstance(share, Tensor):
        return torch.where(share > 0, product, 0)
    if share:
        return product
    return torch.zeros_like(product) if isinstance(product, Tensor) else 0


def merge_outputs(
    outputs: Sequence[Any], weights: Sequence[Any], sizes: Sequence[int] | None = None
) -> Any:
    """Merge the results of the steps of one batch's microbatches.

    Numbers and tensors without dimensions become their weighted mean, whole numbers only where they
    differ; other tensors, arrays, lists of plain values and, given the numbers of samples, lists
    with an entry for each are joined along dimension 0; None stays None.
    """
    first = outputs[0]
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat(list(outputs))
    if isinstance(first, np.ndarray) and first.ndim:
        return np.concatenate(outputs)
    if isinstance(first, _WHOLE) and all(output == first for output in outputs):
        return first
    if isinstance(first, Tensor | np.ndarray | np.bool_ | Complex):  # numpy's numbers are, too
        return sum(map(weighted_or_zero, outputs, weights))
    if is_column(first) or (sizes and all(map(has_entry_for_each, outputs, sizes))):
        return type(first)(entry for output in outputs for entry in output)
    parts = [container_entries(output) for output in outputs]
    if parts[0] is None:
        return first
    merged = [merge_outputs(same, weights, sizes) for same in zip(*parts, strict=True)]
    return rebuild(first, merged)


def possible_sample_counts(outputs: Any) -> frozenset[int] | None:
    """Return the numbers of samples that a microbatch may have had, judged by its step's outputs.

    A number counts if each output has as many rows or entries; then outputs of microbatches can be
    joined along the samples. None: any number, for the step returned None.
    """
    if outputs is None:
        return None
    if isinstance(outputs, Tensor | np.ndarray):
        return frozenset(outputs.shape[:1])
    if is_column(outputs):
        return frozenset([len(outputs)])
    parts = container_entries(outputs)
    if parts is None:
        return frozenset()
    counts = [count for count in map(possible_sample_counts, parts) if count is not None]
    if not counts:
        return None
    common = frozenset.intersection(*counts)
    return common | {len(parts)} if has_entry_for_each(outputs, len(parts)) else common


def start_checksum(batch: Any) -> Callable[[], int]:
    """Start to compute a checksum of a batch, from at most 4096 elements of each tensor.

    Returns:
        A function that waits for values of an accelerator, and returns the checksum.
    """
    leaves = batch_leaves(batch)
    inner = [tensor for leaf in leaves for tensor in tensors_of_object(leaf)]
    values = [_start_checksum_of(leaf) for leaf in leaves + inner]

    def finish() -> int:
        return reduce(lambda total, value: (total * _PRIME + value()) % (1 << 61), values, 0)

    return finish


def shape_signature(batch: Any) -> tuple[Any, ...]:
    """Return the parts of a batch on which shapes inside a step may depend."""
    signature: list[Any] = []
    for value in batch_leaves(batch, keeps_columns=True):
        if isinstance(value, Tensor | np.ndarray):
            signature.append((_shape_of(value), value.dtype))
        elif is_column(value):
            signature.append((type(value), len(value)))
        else:
            signature.append(value if isinstance(value, int) else type(value))
            signature.extend((_shape_of(part), part.dtype) for part in tensors_of_object(value))
    return tuple(signature)


def _shape_of(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_nested:
        return tuple(part.shape for part in value.unbind())
    return value.shape


def _start_checksum_of(leaf: Any) -> Callable[[], int]:
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        leaf = torch.from_numpy(np.ascontiguousarray(leaf))
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested:
        if not leaf.numel():
            return lambda: 0
        flat = leaf.detach().reshape(-1)
        distance = flat.numel() // 4096
        sample = (flat[::distance] if distance > 1 else flat).contiguous().view(torch.uint8)
        if late_values.is_on_accelerator(sample):
            read = late_values.start_host_copy(sample)
            return lambda: zlib.crc32(read().numpy().data)
        checksum = zlib.crc32(sample.numpy().data)  # now: the step may write the batch
        return lambda: checksum
    value = zlib.crc32(str(leaf).encode()) if isinstance(leaf, (str, int, float)) else 0
    return lambda: value
