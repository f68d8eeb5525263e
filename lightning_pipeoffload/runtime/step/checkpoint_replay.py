"""Compares recomputation in B with the result of F, in the first step (rule 5 of the contract).

Forwards of other microbatches run between F and B. So an attribute that a checkpointed function
reads in addition to its arguments may have another microbatch's value by then. All checkpoints of
``torch.utils.checkpoint`` are compared, of the user, of libraries and of this package, around
blocks, their parts or the head. The rules are in docs/contract_rules.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint as torchs
from torch import Tensor
from torch._guards import TracingContext  # private: what is being compiled

from lightning_pipeoffload.runtime import ACTIVE_SETTINGS, NOTHING, replaced, tensors_in
from lightning_pipeoffload.runtime.cut import StageExit
from lightning_pipeoffload.runtime.shapes import ShapeOnly
from lightning_pipeoffload.runtime.step.recomputed_block import RecomputedCall
from lightning_pipeoffload.runtime.step.stage_pass import StagePass
from lightning_pipeoffload.runtime.step.step_writes import StepWrites

# Private, both: every way to make a checkpoint calls one of them. Before torch 2.14 the first has
# another name, and takes the function's arguments among its own.
_NAME = "_checkpoint_without_reentrant_generator"
_TAKES_ARGUMENTS_APART = hasattr(torchs, f"{_NAME}_impl")
GENERATOR = f"{_NAME}_impl" if _TAKES_ARGUMENTS_APART else _NAME
_make_checkpoint = getattr(torchs, GENERATOR)
_run_reentrant = torchs.CheckpointFunction.forward


@dataclass(frozen=True)
class CheckpointChecker:
    """Wraps the functions that are checkpointed during one F.

    Attributes:
        step: The F.
        writes: Undoes the attribute writes of a recomputation.
        compares: Whether to compare results of B with those of F, bit for bit.
        is_first: Whether to refuse statistics that B updates again.
    """

    step: StagePass
    writes: StepWrites
    compares: bool
    is_first: bool

    def checking_recomputation(self) -> AbstractContextManager[None]:
        """Return the context in which functions that are checkpointed are wrapped."""
        return ACTIVE_SETTINGS.during(self)


class _CheckedFunction:
    def __init__(self, function: Callable[..., Any], checker: CheckpointChecker) -> None:
        self._function = function
        self._checker = checker
        self._digests: list[int] = []
        self._called_before, is_in_block = checker.step.last_called_block()
        self._is_in_block = is_in_block or checker.writes.is_block(function)
        self._name = ""
        is_ours = isinstance(function, RecomputedCall)
        self._how = 'is recomputed (recompute="full")' if is_ours else "is checkpointed"
        self._forward = checker.writes.num_forwards
        # As they are in F: this package's own checkpoints run again on copies.
        self._statistics = checker.writes.statistics() if checker.is_first else []

    def record_output(self, output: Any) -> None:
        self._name = self._find_name()
        if self._checker.compares:
            self._digests = _digests(output)

    def _find_name(self) -> str:
        called, is_running = self._checker.step.last_called_block()
        if is_running or called != self._called_before:
            return called
        return getattr(self._function, "__qualname__", type(self._function).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = [tensor._version for _, tensor in self._statistics]  # private: counts writes
        try:
            return self._run_again(*args, **kwargs)
        finally:  # torch may end it early
            self._check_statistics(before)

    def _check_statistics(self, before: list[int]) -> None:
        """Refuse statistics that B updates after F's of later microbatches have done so."""
        if self._forward == self._checker.writes.num_forwards:
            return
        for (name, tensor), version in zip(self._statistics, before, strict=True):
            if tensor._version != version:
                raise ValueError(
                    f"{self._name} is checkpointed and updates {name}, and the backward does so "
                    f"again, on one device before the forward of the next microbatch, here after "
                    f'it: leave out the checkpoint, and use recompute="full", which updates it once'
                )

    def _run_again(self, *args: Any, **kwargs: Any) -> Any:
        with (
            self._checker.checking_recomputation(),
            self._checker.writes.undoing_recompute_writes(self._is_in_block),
        ):
            try:
                output = self._function(*args, **kwargs)
            except RuntimeError as error:
                if type(error) is not RuntimeError:  # it says more: PlaceholderError, no memory
                    raise
                raise self._refusal() from error
        if self._digests and self._digests != _digests(output):
            raise self._refusal()
        return output

    def _refusal(self) -> ValueError:
        return ValueError(
            f"{self._name} {self._how} and does not compute again in the backward what it "
            f"computed in the forward: it reads something that has changed since, an attribute "
            f"that the step writes, a cache of keys or a generator of random numbers, say. Give "
            f"it what it reads as an argument (a Hugging Face model use_cache=False), and draw "
            f"from torch's global generator. 4-bit layers of bitsandbytes that are left in "
            f"evaluation mode change on a CPU: call train() of the model, or its "
            f"enable_input_require_grads()"
        )


class _CheckedReentrantFunction(_CheckedFunction):
    _is_first = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_first:
            return super().__call__(*args, **kwargs)
        self._is_first = False
        output = self._function(*args, **kwargs)
        self.record_output(output)
        return output


def _checkpoint_until_2_13(
    function: Callable[..., Any],
    preserve_rng_state: bool,
    context_fn: Any,
    determinism_check: str,
    debug: bool,
    early_stop: bool,
    *args: Any,
    **kwargs: Any,
) -> Iterator[None]:
    def make(checked: Any, stops: bool) -> Iterator[None]:
        options = preserve_rng_state, context_fn, determinism_check, debug, stops
        return _make_checkpoint(checked, *options, *args, **kwargs)

    return _wrap_checkpoint(function, early_stop, make)


def _checkpoint(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    early_stop: bool = True,
    **options: Any,
) -> Iterator[None]:
    def make(checked: Any, stops: bool) -> Iterator[None]:
        return _make_checkpoint(checked, args, kwargs, early_stop=stops, **options)

    return _wrap_checkpoint(function, early_stop, make)


def _wrap_checkpoint(
    function: Callable[..., Any],
    early_stop: bool,
    make: Callable[[Any, bool], Iterator[None]],
) -> Iterator[None]:
    """Run torch's generator, before and after the checkpointed function."""
    checked: Any = function
    checker = _find_checker()
    if checker is not None:
        checked = _CheckedFunction(function, checker)
        early_stop = early_stop and not checker.compares
    plain: Any = make(checked, early_stop)
    with NOTHING if checker is None else checker.step.uncounted():
        next(plain)
    try:
        yield
    except BaseException as error:
        if isinstance(error, StageExit) and checked is not function:
            checked.record_output(error.output)
        plain.throw(error)
    if checker is not None:
        with checker.step.uncounted():
            # Private: only a local variable of torch's checkpoint() has the result.
            checked.record_output(sys._getframe(1).f_locals["ret"])
    next(plain, None)


def _reentrant_forward(
    ctx: Any, function: Callable[..., Any], preserve_rng_state: bool, *args: Any
) -> Any:
    checker = _find_checker()
    checked = function if checker is None else _CheckedReentrantFunction(function, checker)
    return _run_reentrant(ctx, checked, preserve_rng_state, *args)


def _find_checker() -> CheckpointChecker | None:
    # While something is compiled its checkpoints have no values.
    return None if TracingContext.try_get() else ACTIVE_SETTINGS.latest(CheckpointChecker)


def is_repeatable(device: torch.device) -> bool:
    """Return whether repeated operations give equal bits; accelerators may sum in any order."""
    return device.type == "cpu" or torch.are_deterministic_algorithms_enabled()


@contextmanager
def patching_checkpoints() -> Iterator[None]:
    """Patch ``torch.utils.checkpoint``, so that a :class:`CheckpointChecker` wraps functions."""
    generator = _checkpoint if _TAKES_ARGUMENTS_APART else _checkpoint_until_2_13
    with (
        replaced(torchs, GENERATOR, generator),
        replaced(torchs.CheckpointFunction, "forward", staticmethod(_reentrant_forward)),
    ):
        yield


_WIDTH = 1021


def _digests(output: Any) -> list[int]:
    """Return a checksum for each tensor; none if other stages compute some."""
    tensors = tensors_in(output)
    is_elsewhere = any(isinstance(tensor, ShapeOnly) for tensor in tensors)
    return [] if is_elsewhere else [_digest(tensor) for tensor in tensors]


@torch.no_grad()
def _digest(tensor: Tensor) -> int:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = len(flat) // _WIDTH * _WIDTH
    table, rest = flat[:whole].view(-1, _WIDTH), flat[whole:]
    return hash(tuple(_weigh(sums) for sums in (table.sum(0), table.sum(1), rest)))


def _weigh(sums: Tensor) -> int:
    return int((sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum())
