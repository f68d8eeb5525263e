"""An optimizer's step in host memory, where its state stays.

The user's own optimizer steps host tensors, which replace its parameters during the step. Gradients
and weights are copied through two staging buffers, a bucket of parameters at a time::

    to the host     [ bucket 0 ][ bucket 1 ]            [ bucket 2 ]
    STEP                        [ bucket 0 ][ bucket 1 ]            [ bucket 2 ]
    to the device                           [ bucket 0 ][ bucket 1 ]            [ bucket 2 ]

A rank's last W's run parameter by parameter. Unless clipping or a hook needs all gradients first, a
thread steps buckets with final gradients while other gradients are computed::

    device   W of bucket 0 | W of bucket 1 | W of bucket 2
    host                   | STEP 0        | STEP 1       | STEP 2

See :class:`~lightning_pipeoffload.optimizers.stand_in_step.StandInStep` for the stand-ins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeoffload.optimizers.master_weights import MasterWeights
from lightning_pipeoffload.optimizers.stand_in_step import StandInStep, padded_bytes
from lightning_pipeoffload.runtime.device import make_lanes
from lightning_pipeoffload.runtime.memory import STAGING_BYTES


class _Staged(NamedTuple):
    """A parameter in a staging buffer.

    Attributes:
        weight: A view of the buffer for its value, copied to the host and back.
        gradient: A view of the buffer for its gradient.
    """

    parameter: Tensor
    weight: Tensor
    gradient: Tensor


class _Buffer:
    """A staging buffer, for one bucket at a time."""

    def __init__(self, num_bytes: int, is_pinned: bool) -> None:
        self.num_bytes = num_bytes
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self.filled: Any = None  # reached when the bucket is on the host
        self.left: Any = None  # reached when its weights are back on the device

    def stage(self, gradients: Mapping[Tensor, Tensor]) -> list[_Staged]:
        """Return views of the buffer for each parameter and its gradient."""
        start, staged = 0, []
        for parameter, gradient in gradients.items():
            room = []
            for tensor in (parameter, gradient):
                part = self._memory[start : start + tensor.nbytes]
                room.append(part.view(tensor.dtype).view(tensor.shape))
                start += padded_bytes(tensor)
            staged.append(_Staged(parameter, *room))
        return staged


class _CopiedBucket(NamedTuple):
    """A bucket that is copied to the host, and its buffer."""

    staged: list[_Staged]
    buffer: _Buffer


class HostStep(StandInStep):
    """Steps an optimizer on the host.

    Args:
        optimizer: The user's optimizer.
        device: The device of its parameters.
        by_bucket: Whether it may step some of the parameters at a time.
        masters: The masters of its parameters in half precision; None: the optimizer steps these
            themselves.

    Attributes:
        num_early: The number of parameters stepped before all gradients were final, in all steps.
    """

    num_early = 0
    _argument = "optimizer_offload=True"

    def __init__(
        self,
        optimizer: Optimizer,
        device: torch.device,
        by_bucket: bool,
        masters: MasterWeights | None = None,
    ) -> None:
        super().__init__(optimizer, by_bucket, masters)
        self._is_pinned = device.type != "cpu" and by_bucket
        self._lanes = make_lanes(device)
        self._buffers: list[_Buffer] = []
        self._copied: _CopiedBucket | None = None
        self._num_copied = 0
        self._is_early = False
        self._members: set[Tensor] = set()
        self._submitted: dict[Tensor, None] = {}
        self._waiting: list[Tensor] = []
        self._waiting_bytes = 0
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None
        self._spent = 0.0

    @override
    def begin(self) -> None:
        """Begin a step: from now on :meth:`submit` may step parameters."""
        self._copied, self._last = None, None
        self._submitted, self._waiting, self._waiting_bytes = {}, [], 0
        self._group_members = [group["params"] for group in self._optimizer.param_groups]
        self._members = {p for members in self._group_members for p in members}
        # Whether several buckets are needed is known after the first step.
        self._is_early = self._by_bucket and len(self._buffers) > 1

    def submit(self, parameter: Tensor) -> None:
        """Add a parameter whose gradient is final to the next bucket, which a thread steps.

        It does nothing before :meth:`begin` or after the optimizer's step.
        """
        if not self._is_early or parameter.grad is None or parameter not in self._members:
            return
        num_bytes = self._bytes_of([parameter])
        if num_bytes > self._buffers[0].num_bytes:  # it has not stepped before
            return
        self._members.remove(parameter)  # it may be final twice: with its stage, and by itself
        if self._waiting and self._waiting_bytes + num_bytes > STAGING_BYTES:
            bucket, self._waiting, self._waiting_bytes = self._waiting, [], 0
            self._submitted.update(dict.fromkeys(bucket))
            self.num_early += len(bucket)
            self._lanes.d2h.wait_for_compute()
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "optimizer on the host")
            self._last = self._thread.submit(self._copy_and_step_previous, bucket, self._last)
        self._waiting.append(parameter)
        self._waiting_bytes += num_bytes

    @override
    @torch.no_grad()
    def step_all_but_last_bucket(self) -> None:
        self._is_early = False
        if self._last is not None:
            self._last.result()
        rest = [p for p in self._members_with_gradient() if p not in self._submitted]
        buckets = [*self._in_buckets(rest, STAGING_BYTES)]
        if buckets:
            number = min(len(buckets), 2)
            self._make_buffers(max(map(self._bytes_of, buckets)), number)
        self._lanes.d2h.wait_for_compute()
        for bucket in buckets:
            self._copy_and_step_previous(bucket)
        self._began = time.perf_counter()
        if self._copied is not None:
            self._stand_in_on_host(self._copied, is_last=True)

    @override
    def write_back_parameters(self) -> None:
        if self._standing:
            self._write_back()
            self._lanes.h2d.make_compute_wait(self._lanes.h2d.record_event())
            self.seconds = self._spent + time.perf_counter() - self._began
        self._copied, self._submitted, self._spent = None, {}, 0.0

    @override
    def restore(self) -> None:
        if self._last is not None:
            wait([self._last])
        super().restore()

    @torch.no_grad()
    def _copy_and_step_previous(
        self, bucket: list[Tensor], before: Future[None] | None = None
    ) -> None:
        """Start to copy a bucket to the host, and step the one before it."""
        if before is not None:
            before.result()  # an error in it is that of this one
        began = time.perf_counter()
        copied, self._copied = self._copied, self._start_copy(bucket)
        if copied is not None:
            self._stand_in_on_host(copied, is_last=False)
            self._step_bucket()
            self._write_back()
        self._spent += time.perf_counter() - began

    def _make_buffers(self, num_bytes: int, number: int) -> None:
        if len(self._buffers) < number or self._buffers[0].num_bytes < num_bytes:
            self._buffers = []  # freed before new ones are made
            num_bytes = num_bytes if number == 1 else max(num_bytes, STAGING_BYTES)
            self._buffers = [_Buffer(num_bytes, self._is_pinned) for _ in range(number)]

    def _start_copy(self, bucket: list[Tensor]) -> _CopiedBucket:
        """Start to copy a bucket to the host."""
        lane, buffer = self._lanes.d2h, self._buffers[self._num_copied % len(self._buffers)]
        self._num_copied += 1
        if buffer.left is not None:
            lane.wait_for(buffer.left)
        staged = buffer.stage({p: self._gradient_of(p) for p in bucket})
        for parameter, weight, gradient in staged:
            lane.copy(gradient, self._gradient_of(parameter), "a gradient to the host")
            masters = self._masters_for(parameter)
            if masters is None or not masters.has_current_master(parameter):
                lane.copy(weight, parameter.detach(), "a weight to the host")
        buffer.filled = lane.record_event()
        return _CopiedBucket(staged, buffer)

    def _stand_in_on_host(self, copied: _CopiedBucket, is_last: bool) -> None:
        self._lanes.d2h.synchronize(copied.buffer.filled)
        self._stepping = copied
        standing = {staged.parameter: self._stand_in_for(*staged) for staged in copied.staged}
        self._stand_in(standing, is_last)

    @torch.no_grad()
    def _write_back(self) -> None:
        """Start to copy stepped weights to the device; restore the optimizer's own parameters."""
        for parameter, weight, _ in self._stepping.staged:
            stepped = self._standing[parameter].detach()
            if stepped.data_ptr() != weight.data_ptr():
                weight.copy_(stepped)
            self._lanes.h2d.copy(parameter.detach(), weight, "a weight to the device")
            masters = self._masters_for(parameter)
            if masters is not None:
                masters.put(parameter, stepped)
        self._stepping.buffer.left = self._lanes.h2d.record_event()
        self._restore()


class EarlyStep:
    """Passes final gradients to the step on the host; replaces a sum over replicas.

    Args:
        stages: The stage of each parameter that only one stage of the pipeline uses.
        submit: Called with parameters whose gradients are final.
    """

    def __init__(self, stages: Mapping[Tensor, int], submit: Callable[[Tensor], None]) -> None:
        self._stages, self._submit = stages, submit

    def mark_gradients_final(self, stage: int, coming: Iterable[Tensor] = ()) -> None:
        """Record that a stage's last B has run: its gradients are final except ``coming``."""
        later = {*coming}
        for parameter, owner in self._stages.items():
            if owner == stage and parameter not in later:
                self._submit(parameter)

    def mark_parameter_final(self, parameter: Tensor) -> None:
        """Record that the last W of a parameter has run."""
        if parameter in self._stages:
            self._submit(parameter)
