"""Writes down the values that a step has before and between its blocks, to compare two runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.leaves import leaves_of
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.users_code.users_lines import calling_line

_MOST_ELEMENTS = 4096
_CLOSE = 1e-4  # sums on an accelerator may differ by their order


class LoggedValue(NamedTuple):
    """One call of a torch function.

    Attributes:
        segment: The segment of the step.
        name: The name of the function.
        given: The numbers among its arguments.
        made: Numbers that tell its results apart.
        line: The line of the user's code that called it.
    """

    segment: int
    name: str
    given: list[float]
    made: list[float]
    line: str


class ValueLog:
    """What a run of a step computes beside its blocks; shape-only tensors have no value.

    Attributes:
        entries: The calls, in their order.
    """

    def __init__(self) -> None:
        self.entries: list[LoggedValue] = []

    def note(self, segment: int, func: Callable[..., Any], arguments: Any, result: Any) -> None:
        """Note one call of a torch function, if its result is not whatever was in memory."""
        name = getattr(func, "__name__", "")
        if "empty" not in name:
            given = [float(leaf) for leaf in leaves_of(arguments) if isinstance(leaf, (int, float))]
            made = [number for leaf in leaves_of(result) for number in _numbers_of(leaf)]
            self.entries.append(LoggedValue(segment, name, given, made, calling_line()))


def first_difference(before: ValueLog, after: ValueLog) -> LoggedValue | None:
    """Return the first call of two runs that was not the same; None if all were."""
    for old, new in zip(before.entries, after.entries, strict=False):
        is_same = old.name == new.name and old.given == new.given
        if not (is_same and _are_close(old.made, new.made)):
            return new
    return None


def _are_close(old: list[float], new: list[float]) -> bool:
    return len(old) == len(new) and all(
        a == b or math.isclose(a, b, rel_tol=_CLOSE) or (math.isnan(a) and math.isnan(b))
        for a, b in zip(old, new, strict=True)
    )


@torch.no_grad()
def _numbers_of(leaf: Any) -> Iterable[float]:
    if isinstance(leaf, (int, float)):
        return [float(leaf)]
    if not isinstance(leaf, Tensor) or isinstance(leaf, ShapeOnly) or leaf.is_meta:
        return []
    return _sums_of(leaf)


def _sums_of(tensor: Tensor) -> Iterator[float]:
    if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
        return
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    sample = flat.detach().reshape(-1)
    sample = sample[:: max(1, len(sample) // _MOST_ELEMENTS)].double()
    places = torch.arange(len(sample), dtype=sample.dtype, device=sample.device)
    yield from (sample.sum().item(), (sample @ places).item())
