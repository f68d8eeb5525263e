"""Calls of the user's step, and copies of microbatches that it writes (rule 2).

Each stage of a rank runs the beginning of the step on the same microbatch, and would repeat a write
(``batch["x"].div_(255)``, ``batch.pop("n")``). Microbatches are views of one batch, so autograd
counts a write into one as a write into saved tensors of all. So if the trace records a write,
each stage gets a copy. The tensors that the rank's last stage has written are copied into the
batch, for hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pipeoffload.runtime import leaves_of
from lightning_pipeoffload.runtime.users_code.snapshot import Fingerprint, fingerprint, private_copy

_DEPTH = 20  # of a batch, which has no circles


@dataclass(frozen=True)
class StepCall:
    """The purpose of one call of the user's step.

    Attributes:
        is_trace: The call is traced, without values.
        is_last: The call runs to the step's end; its result and logged values are used.
        is_last_local: The rank's last stage makes the call.
    """

    is_trace: bool = False
    is_last: bool = False
    is_last_local: bool = False


TRACE = StepCall(is_trace=True)

UsersStep = Callable[[Any, StepCall], Any]
"""Calls the user's step on a microbatch."""


def fingerprint_batch(part: Any) -> Fingerprint:
    """Record a microbatch; see :func:`.snapshot.fingerprint`."""
    return fingerprint(part, _DEPTH)


def copy_batch(part: Any, copies: dict[int, Any] | None = None) -> Any:
    """Copy a microbatch; see :func:`.snapshot.private_copy`."""
    return private_copy(part, copies, _DEPTH)


class CallOnCopies:
    """Calls a step on a new copy of a microbatch each time; copies back the last call's writes.

    Args:
        step: The user's step.
        part: The microbatch.
        num_calls: How many calls with values will follow; traces do not count.
    """

    def __init__(self, step: UsersStep, part: Any, num_calls: int) -> None:
        self._step = step
        self._part = part
        self._num_left = num_calls

    def __call__(self, call: StepCall) -> Any:
        """Call the step on a new copy; after the last call, copy its writes to the microbatch."""
        copies: dict[int, Any] = {}
        self._num_left -= not call.is_trace
        try:
            return self._step(copy_batch(self._part, copies), call)
        finally:
            if not self._num_left and not call.is_trace:
                self._write_back(copies)

    @torch.no_grad()
    def _write_back(self, copies: dict[int, Any]) -> None:
        for value, _ in fingerprint_batch(self._part):
            copied = copies.get(id(value))
            if isinstance(copied, Tensor) and (copied.is_inference() or copied._version):
                value.copy_(copied)


def copy_shared_tensors(part: Any, batch: Any) -> Any:
    """Copy the tensors of a microbatch that other microbatches share."""
    shared = {id(leaf) for leaf in leaves_of(batch)}
    tensors = [leaf for leaf in leaves_of(part) if isinstance(leaf, Tensor)]
    return copy_batch(part, {id(leaf): leaf for leaf in tensors if id(leaf) not in shared})
