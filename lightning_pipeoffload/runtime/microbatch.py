"""Splitting of a batch into microbatches, and merging of their results.

``torch.distributed.pipelining.microbatch`` splits positional arguments and tensors; a
LightningModule's batch is one object of any structure, with strings in it.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import reduce
from numbers import Complex, Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipeoffload.runtime import late_values

_Leaf = Callable[[Any], Any]
_PRIME = 1_000_003
_WHOLE = (Integral, np.bool_)


def batch_size(batch: Any) -> int:
    """Return the number of samples: the length of dimension 0, which all tensors share."""
    tensors = [leaf for leaf in batch_leaves(batch) if isinstance(leaf, Tensor)]
    for tensor in tensors:
        _refuse_layout(tensor)
    sizes = {tensor.shape[0] for tensor in tensors if tensor.dim()}
    if len(sizes) > 1:
        sizes.discard(1)
    if not sizes:
        raise ValueError(
            f"the batch ({type(batch).__name__}) holds no tensor with a dimension to cut into "
            f"microbatches; let collate_fn return tensors, in a dict, list, tuple or dataclass say"
        )
    if len(sizes) > 1:
        raise ValueError(
            f"the tensors of the batch have different lengths {sorted(sizes)} along dimension 0, "
            f"which is cut into microbatches; let each have one row for every sample, or one row "
            f"for all"
        )
    return sizes.pop()


def split_batch(batch: Any, size: int, total: int | None = None) -> list[Any]:
    """Split a batch into microbatches of ``size`` samples, the last one possibly smaller.

    ``total`` is the number of samples; None: it is counted.

    Tensors, arrays, lists of plain values and tuples of strings with an entry for each sample are
    split; each microbatch gets all others whole.
    """
    total = batch_size(batch) if total is None else total
    if size < total:
        _refuse_lists_of_numbers(batch, total)

    def cut(start: int) -> Any:
        def leaf(value: Any) -> Any:
            if isinstance(value, Tensor | np.ndarray):
                is_cut = value.ndim and value.shape[0] == total
            else:
                is_cut = _is_column(value) and len(value) == total
            return value[start : start + size] if is_cut else value

        return _map(leaf, batch)

    return [cut(start) for start in range(0, total, size)]


def weigh_parts(
    weigh: Callable[[Any], Any], parts: Sequence[Any]
) -> tuple[Sequence[Any], Callable[[], None]]:
    """Return each microbatch's share of the sum of the user's weights.

    The shares are tensors where the weights are on an accelerator. Also returned is a function that
    checks the weights, once reading them does not make the host wait.
    """
    returned = [weigh(part) for part in parts]
    if not any(map(late_values.is_on_accelerator, returned)):
        weights = _as_numbers(returned)
        _check_weights(weights, returned)
        return [weight / sum(weights) for weight in weights], lambda: None
    on_device = next(filter(late_values.is_on_accelerator, returned)).device
    stacked = torch.stack([torch.as_tensor(w, device=on_device).double() for w in returned])
    read = late_values.start_reading(stacked)
    shares = stacked / stacked.sum()
    return shares.unbind(), lambda: _check_weights(read().tolist(), returned)


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


def in_mean(value: Any, share: Any) -> Any:
    """Return a number times its share; 0 where the share is 0, as a mean over no tokens is NaN."""
    product = weighted(value, share)
    if isinstance(share, Tensor):
        return torch.where(share > 0, product, 0)
    if share:
        return product
    return torch.zeros_like(product) if isinstance(product, Tensor) else 0


def merge_outputs(outputs: Sequence[Any], weights: Sequence[Any]) -> Any:
    """Merge the results of the steps of one batch's microbatches.

    Numbers and tensors without dimensions become their weighted mean, whole numbers only where they
    differ; other tensors, arrays and lists are joined along dimension 0; None stays None.
    """
    first = outputs[0]
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat(list(outputs))
    if isinstance(first, np.ndarray) and first.ndim:
        return np.concatenate(outputs)
    if isinstance(first, _WHOLE) and all(output == first for output in outputs):
        return first
    if isinstance(first, Tensor | np.ndarray | np.bool_ | Complex):  # numpy's numbers are, too
        return sum(map(in_mean, outputs, weights))
    if _is_column(first):
        return type(first)(entry for output in outputs for entry in output)
    parts = [_parts(output) for output in outputs]
    if parts[0] is None:
        return first
    merged = [merge_outputs(same, weights) for same in zip(*parts, strict=True)]
    return _rebuild(first, merged)


def has_row_for_each(outputs: Any, num_samples: int) -> bool:
    """Whether a step's outputs have a row for each sample, so that microbatches' can be joined."""
    found: list[bool] = []

    def leaf(value: Any) -> Any:
        has_rows = isinstance(value, Tensor | np.ndarray) and value.ndim or _is_column(value)
        found.append(len(value) == num_samples if has_rows else value is None)
        return value

    _map(leaf, outputs)
    return all(found)


def start_checksum(batch: Any) -> Callable[[], int]:
    """Start to compute a checksum of a batch, from at most 4096 elements of each tensor.

    Returns:
        A function that waits for values of an accelerator, and returns the checksum.
    """
    values = [_start_checksum_of(leaf) for leaf in batch_leaves(batch)]

    def finish() -> int:
        return reduce(lambda total, value: (total * _PRIME + value()) % (1 << 61), values, 0)

    return finish


def shape_signature(batch: Any) -> tuple[Any, ...]:
    """Return the parts of a batch on which shapes inside a step may depend."""
    found: list[Any] = []

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            found.append((value.shape, value.dtype))
        elif _is_column(value):
            found.append((type(value), len(value)))
        else:
            found.append(value if isinstance(value, int) else type(value))
        return value

    _map(leaf, batch)
    return tuple(found)


def _start_checksum_of(leaf: Any) -> Callable[[], int]:
    if isinstance(leaf, Tensor) and leaf.numel():
        flat = leaf.detach().reshape(-1)
        distance = flat.numel() // 4096
        sample = (flat[::distance] if distance > 1 else flat).contiguous().view(torch.uint8)
        if late_values.is_on_accelerator(sample):
            read = late_values.start_reading(sample)
            return lambda: zlib.crc32(read().numpy().data)
        checksum = zlib.crc32(sample.numpy().data)  # now: the step may write the batch
        return lambda: checksum
    value = zlib.crc32(str(leaf).encode()) if isinstance(leaf, (str, int, float)) else 0
    return lambda: value


def _refuse_layout(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise ValueError(
            f"the batch holds a {kind} tensor, which cannot be cut into microbatches; let "
            f"collate_fn return a dense one (to_dense(), or padded: torch.nested.to_padded_tensor) "
            f"and make it {kind} in the step"
        )


def _refuse_lists_of_numbers(batch: Any, total: int) -> None:
    for name, value in _named_lists(batch, "batch"):
        if len(value) == total and all(isinstance(entry, Complex) for entry in value):
            raise ValueError(
                f"{name} is a list of {total} numbers, and the batch has as many samples: there is "
                f"no telling whether it has one for each; let collate_fn make it a tensor if so, "
                f"and a tuple if not"
            )


def _named_lists(tree: Any, name: str) -> Iterator[tuple[str, list[Any]]]:
    if isinstance(tree, list) and _is_column(tree):
        yield name, tree
        return
    parts = _parts(tree) or []
    keys = list(tree) if isinstance(tree, Mapping) else _field_names(tree) or range(len(parts))
    for key, part in zip(keys, parts, strict=True):
        yield from _named_lists(part, f"{name}[{key!r}]")


def _is_column(value: Any) -> bool:
    """Whether ``value`` is a list of plain values, or a tuple of strings as of torch's collate."""
    if type(value) is tuple:
        return bool(value) and all(isinstance(entry, (str, bytes)) for entry in value)
    return isinstance(value, list) and not any(
        isinstance(entry, Tensor) or _parts(entry) is not None for entry in value
    )


def batch_leaves(tree: Any) -> list[Any]:
    """Return the tensors and values of a batch, and the entries of its lists of plain values."""
    found: list[Any] = []

    def leaf(value: Any) -> Any:
        found.extend(value if _is_column(value) else [value])
        return value

    _map(leaf, tree)
    return found


def _map(leaf: _Leaf, tree: Any) -> Any:
    """Apply ``leaf`` to tensors, values and lists of values."""
    if isinstance(tree, Tensor) or _is_column(tree):
        return leaf(tree)
    parts = _parts(tree)
    if parts is None:
        return leaf(tree)
    return _rebuild(tree, [_map(leaf, part) for part in parts])


def _parts(tree: Any) -> list[Any] | None:
    """Return the entries of a container; None if it is none."""
    if isinstance(tree, Mapping):
        return list(tree.values())
    if isinstance(tree, (list, tuple)):
        return list(tree)
    names = _field_names(tree)
    return [getattr(tree, name) for name in names] if names else None


def _field_names(tree: Any) -> list[str]:
    """Return the fields of an object of a dataclass or attrs class; empty for any other."""
    if isinstance(tree, type):
        return []
    if dataclasses.is_dataclass(tree):
        return [field.name for field in dataclasses.fields(tree)]
    return [field.name for field in getattr(type(tree), "__attrs_attrs__", ())]


def _rebuild(tree: Any, parts: list[Any]) -> Any:
    """Make a container like ``tree`` with other entries, whatever its constructor takes."""
    if isinstance(tree, tuple):
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if isinstance(tree, Mapping) and not isinstance(tree, MutableMapping):
        return type(tree)(dict(zip(tree, parts, strict=True)))  # type: ignore[call-arg]
    made = copy.copy(tree)
    if isinstance(tree, list):
        made[:] = parts
    elif isinstance(tree, MutableMapping):
        for key, part in zip(tree, parts, strict=True):
            made[key] = part
    else:
        for name, part in zip(_field_names(tree), parts, strict=True):
            object.__setattr__(made, name, part)  # it may be frozen
    return made
