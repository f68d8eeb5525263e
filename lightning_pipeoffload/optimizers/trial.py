"""Whether an optimizer may have one rank's parameters only: tried, on small ones.

A rank's optimizer goes by what the rank has. That is the step which one device would take where
each parameter is treated by itself; with a norm over all of them, a rate that they share, or random
numbers drawn for one after the other it would silently be another. No list of classes could know
this of the user's own.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # private: its documented home
from typing_extensions import override

from lightning_pipeoffload.optimizers.candidate import PLACES, OptimizedValues, OptimizerCandidate
from lightning_pipeoffload.optimizers.copy import NotRebuiltError, described
from lightning_pipeoffload.runtime.leaves import leaves_of
from lightning_pipeoffload.runtime.randomness import forked_randomness

# Of gradients: a threshold for the norm of all lies between the two tensors' at one of them.
_SCALES = (1e-6, 1e-3, 1.0, 1e3)
# What is shared may show after some steps only.
_STEPS_OF_SCALE = 3


class NotTriedError(Exception):
    """An optimizer like the user's could not be made, or did not run."""


@dataclass(frozen=True)
class OptimizerTrial:
    """What steps on small tensors have shown of an optimizer.

    Attributes:
        needs_all_parameters: Whether two parameters together take other steps than each by itself.
        needs_whole_tensors: Whether the halves of a tensor, laid out flat, take other steps than
            the tensor, or what is kept for them is no half of what is kept for it.
    """

    needs_all_parameters: bool
    needs_whole_tensors: bool


_TRIED: dict[tuple[type, str, str], OptimizerTrial] = {}


def refuse_optimizer(
    optimizer: Any, device: torch.device, num_ranks: int, num_sharing: int = 1
) -> None:
    """Refuse an optimizer whose step for a parameter depends on which others it has.

    Args:
        optimizer: The user's optimizer.
        device: The device that its parameters will be on.
        num_ranks: The number of ranks over which they are spread.
        num_sharing: The number of replicas that share out its step.

    Raises:
        ValueError: Its step depends on them; the message names its class, why, and what to do.
    """
    if not optimizer.param_groups:  # Lightning's, where the user has none
        return
    name = type(optimizer).__name__
    if num_sharing > 1 and hasattr(optimizer, "eval"):
        raise ValueError(
            f"{name} makes weights for evaluation of all that it keeps, and each of the "
            f'{num_sharing} replicas has a part of that; set sharding="none", or use another one'
        )
    whose = f"{num_ranks} ranks" if num_ranks > 1 else f"{num_sharing} replicas"
    option = "devices=1" if num_ranks > 1 else 'sharding="none"'
    instead = f"use an optimizer that treats each parameter by itself, such as AdamW, or {option}"
    try:
        trial = try_optimizer(optimizer, device)
    except NotTriedError as error:
        raise ValueError(
            f"{name} cannot be tried on small tensors ({error}), so there is no knowing whether "
            f"its step is right for a part of the parameters, which is what each of the "
            f"{whose} has; {instead}"
        ) from error.__cause__
    if trial.needs_all_parameters:
        raise ValueError(
            f"{name} computes over all its parameters, or draws random numbers for them (two small "
            f"tensors together did not take the step of each by itself), and each of the "
            f"{whose} has a part of them only; {instead}"
        )


def try_optimizer(optimizer: Any, device: torch.device) -> OptimizerTrial:
    """Take steps with two small tensors together, apart, and in halves; leave no trace.

    Args:
        optimizer: The user's optimizer, like which others are made.
        device: The device to try it on.

    Raises:
        NotTriedError: There is no making another one, or it takes neither dense gradients nor
            sparse ones.
    """
    try:
        key = (type(optimizer), device.type, described(optimizer))
    except NotRebuiltError as error:
        raise NotTriedError(str(error)) from error
    if key in _TRIED:
        return _TRIED[key]
    with without_trace():
        trial = _try_dense_or_sparse(optimizer, device)
    if key[-1]:
        _TRIED[key] = trial
    return trial


def _try_dense_or_sparse(optimizer: Any, device: torch.device) -> OptimizerTrial:
    try:
        return _try(partial(OptimizerCandidate, optimizer, device, is_sparse=False))
    except NotTriedError as error:
        try:
            return _try(partial(OptimizerCandidate, optimizer, device, is_sparse=True))
        except NotTriedError:
            raise error from error.__cause__


def _try(make_candidate: Callable[..., OptimizerCandidate]) -> OptimizerTrial:
    with _NoCollectives():  # here only: it takes half of the time
        together = _take_steps(make_candidate)
    apart = {place: _take_steps(make_candidate, own=(place,)) for place in PLACES}
    try:
        halves = _take_steps(make_candidate, in_halves=True)
    except NotTriedError:
        halves = []
    by_element = all(kept.is_by_element for step in halves for kept in step.values())
    return OptimizerTrial(
        needs_all_parameters=not all(
            _are_equal([step[place] for step in together], [step[place] for step in alone])
            for place, alone in apart.items()
        ),
        needs_whole_tensors=not by_element or not _are_equal(_values(together), _values(halves)),
    )


def _take_steps(
    make_candidate: Callable[..., OptimizerCandidate], **which: Any
) -> list[dict[int, OptimizedValues]]:
    try:
        candidate = make_candidate(**which)
        return [candidate.step(scale) for scale in _SCALES for _ in range(_STEPS_OF_SCALE)]
    except NotRebuiltError as error:
        raise NotTriedError(str(error)) from error
    except Exception as error:
        raise NotTriedError(f"{type(error).__name__}: {error}".splitlines()[0]) from error


def _values(steps: list[dict[int, OptimizedValues]]) -> list[list[Tensor]]:
    return [kept.values for step in steps for kept in step.values()]


def _are_equal(tree: Any, other: Any) -> bool:
    """Whether two trees have the same leaves, to the bit; NaN is NaN."""
    leaves, others = list(leaves_of(tree)), list(leaves_of(other))
    return len(leaves) == len(others) and all(map(_is_same, leaves, others))


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape != b.shape:
        return False
    return bool(torch.as_tensor((a == b) | ((a != a) & (b != b))).all())


@contextmanager
def without_trace() -> Iterator[None]:
    """Leave random numbers, warnings and what is printed as if nothing had run."""
    with forked_randomness(), warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


class _NoCollectives(TorchDispatchMode):
    """Refuses collectives: other ranks have other parameters."""

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise RuntimeError(f"its step communicates with other processes by {func.__name__}")
        return func(*args, **(kwargs or {}))
