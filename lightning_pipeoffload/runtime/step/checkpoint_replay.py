"""In the first step, what a checkpoint computes again in B is compared with what F computed.

On one device a microbatch's backward follows its forward; here other forwards come in between, and
what a block reads beside its arguments may be the last microbatch's by then. This holds for
checkpoints of the user's, of a library's and of our own, around blocks, parts of them or the head.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint as torchs
from torch import Tensor
from torch._guards import TracingContext  # private: what is being compiled

from lightning_pipeoffload.runtime.cut.block_chain import StageExit
from lightning_pipeoffload.runtime.in_force import IN_FORCE
from lightning_pipeoffload.runtime.leaves import tensors_in
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.step.stage_pass import StagePass
from lightning_pipeoffload.runtime.step.step_writes import StepWrites

# Private, both: where torch makes a checkpoint, whichever name its users have imported.
_make_checkpoint = torchs._checkpoint_without_reentrant_generator
_run_reentrant = torchs.CheckpointFunction.forward


@dataclass(frozen=True)
class CheckpointWatch:
    """Follows the checkpoints of one F.

    Attributes:
        step: The F, which knows the block that was called last.
        writes: What the rank's steps write.
        compares: Whether B's results are compared with F's.
    """

    step: StagePass
    writes: StepWrites
    compares: bool

    def watching(self) -> AbstractContextManager[None]:
        """Follow what is checkpointed inside."""
        return IN_FORCE.during(self)


class _Rerun:
    def __init__(self, function: Callable[..., Any], watch: CheckpointWatch) -> None:
        self._function = function
        self._watch = watch
        self._digests: list[int] = []
        self._called_before, _ = watch.step.place()
        self._name = ""

    def expect(self, output: Any) -> None:
        if self._watch.compares:
            self._digests = _digests(output)
            self._name = self._find_name()

    def _find_name(self) -> str:
        called, is_running = self._watch.step.place()
        if is_running or called != self._called_before:
            return called
        return getattr(self._function, "__qualname__", type(self._function).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._watch.watching(), self._watch.writes.running_again():
            output = self._function(*args, **kwargs)
        found = _digests(output) if self._digests else []
        # Where a stage leaves the function early, what it hands on beside the output comes last.
        if found != self._digests[: len(found)]:
            raise ValueError(
                f"{self._name} is checkpointed and does not compute again in the backward what it "
                f"computed in the forward: it reads something that has changed since, an "
                f"attribute that the step writes or a generator of random numbers, say. Give it "
                f"what it reads as an argument, and draw from torch's own generator"
            )
        return output


class _ReentrantRerun(_Rerun):
    _is_first = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_first:
            return super().__call__(*args, **kwargs)
        self._is_first = False
        output = self._function(*args, **kwargs)
        self.expect(output)
        return output


def _checkpoint(
    function: Callable[..., Any],
    preserve_rng_state: bool,
    context_fn: Any,
    determinism_check: str,
    debug: bool,
    early_stop: bool,
    *args: Any,
    **kwargs: Any,
) -> Iterator[None]:
    """Do what torch's generator does: what comes before a checkpointed function, and after it."""
    rerun: Any = function
    watch = _find_watch()
    if watch is not None:
        rerun = _Rerun(function, watch)
        early_stop = early_stop and not watch.compares
    options = preserve_rng_state, context_fn, determinism_check, debug, early_stop
    plain = _make_checkpoint(rerun, *options, *args, **kwargs)
    next(plain)
    try:
        yield
    except BaseException as error:
        if isinstance(error, StageExit) and rerun is not function:
            rerun.expect(error.payload)
        plain.throw(error)
    if rerun is not function:
        # Private: nothing but the local variable of torch's checkpoint() has the result.
        rerun.expect(sys._getframe(1).f_locals["ret"])
    next(plain, None)


def _forward(ctx: Any, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    watch = _find_watch()
    rerun = function if watch is None else _ReentrantRerun(function, watch)
    return _run_reentrant(ctx, rerun, preserve_rng_state, *args)


def _find_watch() -> CheckpointWatch | None:
    # A checkpoint inside of what is being compiled has no values yet.
    return None if TracingContext.try_get() else IN_FORCE.latest(CheckpointWatch)


def is_repeatable(device: torch.device) -> bool:
    """Whether operations compute the same bits again: an accelerator's may add in any order."""
    return device.type == "cpu" or torch.are_deterministic_algorithms_enabled()


def install_replay() -> None:
    """Follow torch's checkpoints from now on; again is harmless."""
    torchs._checkpoint_without_reentrant_generator = _checkpoint  # type: ignore[assignment]
    torchs.CheckpointFunction.forward = staticmethod(_forward)  # type: ignore[method-assign]


def remove_replay() -> None:
    """Leave torch's checkpoints alone."""
    torchs._checkpoint_without_reentrant_generator = _make_checkpoint
    torchs.CheckpointFunction.forward = staticmethod(_run_reentrant)  # type: ignore[method-assign]


_WIDTH = 1021


def _digests(output: Any) -> list[int]:
    """Return what tells results apart; nothing of those that are computed elsewhere."""
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
