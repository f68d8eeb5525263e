"""Calls of the user's step: what each is for, and copies of the microbatch that it changes.

Each stage of a rank runs the beginning of the step on the same microbatch, and would change it once
more (``batch["x"].div_(255)``, ``batch.pop("n")``); and microbatches are views of one batch, so
that a write into one looks like a write into what autograd has saved of others. So where a probe
has seen a change, each stage has a copy. What the rank's last one has written into tensors the
batch has then, for hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.leaves import leaves_of
from lightning_pipeoffload.runtime.users_code.snapshot import Look, look_at, private_copy

_DEPTH = 20  # of a batch, which has no circles


@dataclass(frozen=True)
class StepCall:
    """What one call of the user's step is for.

    Attributes:
        is_probe: It is looked at, and has no values.
        is_last: It comes to the step's end: its result counts, and what it logs.
        is_last_local: No call of this rank comes farther with the same microbatch.
    """

    is_probe: bool = False
    is_last: bool = False
    is_last_local: bool = False


PROBE = StepCall(is_probe=True)

UsersStep = Callable[[Any, StepCall], Any]
"""Calls the user's step on a microbatch."""


def look_at_part(part: Any) -> Look:
    """Look at all that a microbatch consists of; see :func:`.snapshot.look_at`."""
    return look_at(part, _DEPTH)


def copy_part(part: Any, known: dict[int, Any] | None = None) -> Any:
    """Copy a microbatch; see :func:`.snapshot.private_copy`."""
    return private_copy(part, known, _DEPTH)


class CallOnCopies:
    """Calls a step on a new copy of a microbatch each time, the last time for hooks to see.

    Args:
        step: The user's step.
        part: The microbatch.
        num_calls: After how many the microbatch is to have what the step has written.
    """

    def __init__(self, step: UsersStep, part: Any, num_calls: int) -> None:
        self._step = step
        self._part = part
        self._num_left = num_calls

    def __call__(self, call: StepCall) -> Any:
        """Call the step; a look at it does not count."""
        copies: dict[int, Any] = {}
        self._num_left -= not call.is_probe
        try:
            return self._step(copy_part(self._part, copies), call)
        finally:
            if not self._num_left and not call.is_probe:
                self._write_back(copies)

    @torch.no_grad()
    def _write_back(self, copies: dict[int, Any]) -> None:
        for value, _ in look_at_part(self._part):
            copied = copies.get(id(value))
            if isinstance(copied, Tensor) and (copied.is_inference() or copied._version):
                value.copy_(copied)


def without_shared(part: Any, batch: Any) -> Any:
    """Give a microbatch its own copy of what it has in common with others of its batch."""
    shared = {id(leaf) for leaf in leaves_of(batch)}
    tensors = [leaf for leaf in leaves_of(part) if isinstance(leaf, Tensor)]
    return copy_part(part, {id(leaf): leaf for leaf in tensors if id(leaf) not in shared})
