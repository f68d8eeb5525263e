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

An optimizer that needs all its parameters at once has a single bucket. The user's call of ``step``
computes the last bucket, so hooks, schedulers and counters count one step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeoffload.optimizers.master_weights import MasterWeights, is_half
from lightning_pipeoffload.runtime.accelerator import make_lanes
from lightning_pipeoffload.runtime.memory.host_memory import STAGING_BYTES
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly

_ALIGNMENT = 64  # of tensors in a buffer, in bytes


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

    def stage(self, parameters: Sequence[Tensor]) -> list[_Staged]:
        """Return views of the buffer for each parameter and its gradient."""
        start, staged = 0, []
        for parameter in parameters:
            room = []
            for tensor in (parameter, _gradient_of(parameter)):
                part = self._memory[start : start + tensor.nbytes]
                room.append(part.view(tensor.dtype).view(tensor.shape))
                start += _padded(tensor)
            staged.append(_Staged(parameter, *room))
        return staged


class _Coming(NamedTuple):
    """A bucket that is copied to the host, and its buffer."""

    staged: list[_Staged]
    buffer: _Buffer


class HostStep:
    """Steps an optimizer on the host.

    Args:
        optimizer: The user's optimizer.
        device: The device of its parameters.
        by_bucket: Whether it may step some of the parameters at a time.
        masters: The masters of its parameters in half precision; None: the optimizer steps these
            themselves.

    Attributes:
        num_early: The number of parameters stepped before all gradients were final, in all steps.
        seconds: Seconds of the last step, without waits for gradients.
    """

    num_early = 0
    seconds = 0.0

    def __init__(
        self,
        optimizer: Optimizer,
        device: torch.device,
        by_bucket: bool,
        masters: MasterWeights | None = None,
    ) -> None:
        self._optimizer, self._masters = optimizer, masters
        self._by_bucket = by_bucket
        self._is_pinned = device.type != "cpu" and by_bucket
        self._lanes = make_lanes(device)
        self._buffers: list[_Buffer] = []
        self._standing: dict[Tensor, Tensor] = {}
        self._state: Any = None
        self._coming: _Coming | None = None
        self._num_brought = 0
        self._is_early = False
        self._members: set[Tensor] = set()
        self._taken: dict[Tensor, None] = {}
        self._waiting: list[Tensor] = []
        self._waiting_bytes = 0
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None
        self._spent = 0.0

    def begin(self) -> None:
        """Begin a step: from now on :meth:`take` may step parameters."""
        self._coming, self._last = None, None
        self._taken, self._waiting, self._waiting_bytes = {}, [], 0
        self._own = [group["params"] for group in self._optimizer.param_groups]
        self._members = {p for own in self._own for p in own}
        # Whether several buckets are needed is known after the first step.
        self._is_early = self._by_bucket and len(self._buffers) > 1

    def take(self, parameter: Tensor) -> None:
        """Add a parameter whose gradient is final to the next bucket, which a thread steps.

        It does nothing before :meth:`begin` or after the optimizer's step.
        """
        if not self._is_early or parameter.grad is None or parameter not in self._members:
            return
        num_bytes = _bytes_of([parameter])
        if num_bytes > self._buffers[0].num_bytes:  # it has not stepped before
            return
        self._members.remove(parameter)  # it may be final twice: with its stage, and by itself
        if self._waiting and self._waiting_bytes + num_bytes > STAGING_BYTES:
            bucket, self._waiting, self._waiting_bytes = self._waiting, [], 0
            self._taken.update(dict.fromkeys(bucket))
            self.num_early += len(bucket)
            self._lanes.d2h.wait_for_compute()
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "optimizer on the host")
            self._last = self._thread.submit(self._advance, bucket, self._last)
        self._waiting.append(parameter)
        self._waiting_bytes += num_bytes

    @torch.no_grad()
    def start(self) -> None:
        """Step all buckets but the last, which is then in the optimizer's groups."""
        self._is_early = False
        if self._last is not None:
            self._last.result()
        self._own = [group["params"] for group in self._optimizer.param_groups]
        stepping = [p for own in self._own for p in own if p.grad is not None]
        rest = [p for p in stepping if p not in self._taken]
        buckets = [*_in_buckets(rest, self._by_bucket)]
        if buckets:
            number = min(len(buckets), 2)
            self._make_buffers(max(map(_bytes_of, buckets)), number)
        self._lanes.d2h.wait_for_compute()
        for bucket in buckets:
            self._advance(bucket)
        self._began = time.perf_counter()
        if self._coming is not None:
            self._stand_in(self._coming, is_last=True)

    def finish(self) -> None:
        """Copy the last bucket's weights to the device, after the optimizer has stepped them."""
        if self._standing:
            self._write_back()
            self._lanes.h2d.hold_compute(self._lanes.h2d.mark())
            self.seconds = self._spent + time.perf_counter() - self._began
        self._coming, self._taken, self._spent = None, {}, 0.0

    def put_back(self) -> None:
        """Restore the optimizer's own parameters, also after an error in its step."""
        if self._last is not None:
            wait([self._last])
        self._restore()

    @torch.no_grad()
    def _advance(self, bucket: list[Tensor], before: Future[None] | None = None) -> None:
        """Start to copy a bucket to the host, and step the one before it."""
        if before is not None:
            before.result()  # an error in it is that of this one
        began = time.perf_counter()
        coming, self._coming = self._coming, self._bring(bucket)
        if coming is not None:
            self._stand_in(coming, is_last=False)
            _plain_step(self._optimizer)
            self._write_back()
        self._spent += time.perf_counter() - began

    def _restore(self) -> None:
        if not self._standing:
            return
        of_host, own = self._optimizer.state, {h: p for p, h in self._standing.items()}
        self._optimizer.state = self._state
        for key, state in of_host.items():
            self._state[own.get(key, key)] = state
        for group, members in zip(self._optimizer.param_groups, self._own, strict=True):
            group["params"] = members
        self._standing, self._state = {}, None

    def _make_buffers(self, num_bytes: int, number: int) -> None:
        if len(self._buffers) < number or self._buffers[0].num_bytes < num_bytes:
            self._buffers = []  # freed before new ones are made
            num_bytes = num_bytes if number == 1 else max(num_bytes, STAGING_BYTES)
            self._buffers = [_Buffer(num_bytes, self._is_pinned) for _ in range(number)]

    def _bring(self, bucket: list[Tensor]) -> _Coming:
        """Start to copy a bucket to the host."""
        lane, buffer = self._lanes.d2h, self._buffers[self._num_brought % len(self._buffers)]
        self._num_brought += 1
        if buffer.left is not None:
            lane.wait_for(buffer.left)
        staged = buffer.stage(bucket)
        for parameter, weight, gradient in staged:
            lane.copy(gradient, _gradient_of(parameter), "a gradient to the host")
            masters = self._masters_for(parameter)
            if masters is None or not masters.has(parameter):
                lane.copy(weight, parameter.detach(), "a weight to the host")
        buffer.filled = lane.mark()
        return _Coming(staged, buffer)

    def _masters_for(self, parameter: Tensor) -> MasterWeights | None:
        return self._masters if is_half(parameter) else None

    def _stand_in(self, coming: _Coming, is_last: bool) -> None:
        """Put a bucket's host tensors into the optimizer's groups and state."""
        self._lanes.d2h.finish(coming.buffer.filled)
        self._stepping = coming
        standing = self._standing = {s.parameter: self._on_host(s) for s in coming.staged}
        optimizer, self._state = self._optimizer, self._optimizer.state
        state = {h: self._state[p] for p, h in standing.items() if p in self._state}
        if is_last:  # an optimizer may look at all that it keeps
            state |= {p: value for p, value in self._state.items() if p not in standing}
        optimizer.state = defaultdict(dict, state)
        for group, own in zip(optimizer.param_groups, self._own, strict=True):
            members = [p for p in own if p in standing or (is_last and p.grad is None)]
            group["params"] = [standing.get(p, p) for p in members]

    def _on_host(self, staged: _Staged) -> Tensor:
        parameter, weight, gradient = staged
        masters = self._masters_for(parameter)
        if masters is not None:
            if not masters.has(parameter):
                masters.follow(parameter, weight)
            weight, gradient = masters.of(parameter), gradient.float()
        on_host = nn.Parameter(weight, parameter.requires_grad)
        on_host.__dict__.update(parameter.__dict__)  # an optimizer may go by a user's attribute
        on_host.grad = gradient
        return on_host

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
        self._stepping.buffer.left = self._lanes.h2d.mark()
        self._restore()


class EarlyStep:
    """Passes final gradients to the step on the host; replaces a sum over replicas.

    Args:
        stages: The stage of each parameter that only one stage of the pipeline uses.
        take: Called with parameters whose gradients are final.
    """

    def __init__(self, stages: Mapping[Tensor, int], take: Callable[[Tensor], None]) -> None:
        self._stages, self._take = stages, take

    def expect(self, stage: int, coming: Iterable[Tensor] = ()) -> None:
        """Record that a stage's last B has run: its gradients are final except ``coming``."""
        later = {*coming}
        for parameter, own in self._stages.items():
            if own == stage and parameter not in later:
                self._take(parameter)

    def finish(self, parameter: Tensor) -> None:
        """Record that the last W of a parameter has run."""
        if parameter in self._stages:
            self._take(parameter)


@contextmanager
def state_on_host(optimizer: Optimizer, masters: MasterWeights | None) -> Iterator[None]:
    """Make ``load_state_dict`` load state to the host inside, in the dtype of the host's step.

    By default it moves and casts each tensor to the device and dtype of its parameter.
    """
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            is_cast = masters is not None and is_half(p)
            if not isinstance(p, ShapeOnly) and (is_cast or p.device.type != "cpu"):
                found.append((p, p.data, p.grad))
                p.grad = None
                dtype = torch.float32 if is_cast else p.dtype
                p.data = torch.empty((), dtype=dtype).expand(p.shape)
    try:
        yield
    finally:
        for p, value, gradient in found:
            p.data = value
            p.grad = gradient


def _in_buckets(parameters: Sequence[Tensor], by_bucket: bool) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    num_bytes = 0
    for parameter in parameters:
        num_bytes += _bytes_of([parameter])
        if by_bucket and bucket and num_bytes > STAGING_BYTES:
            yield bucket
            bucket, num_bytes = [], _bytes_of([parameter])
        bucket.append(parameter)
    if bucket:
        yield bucket


def _bytes_of(parameters: Sequence[Tensor]) -> int:
    return sum(_padded(p) + _padded(_gradient_of(p)) for p in parameters)


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _gradient_of(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout is not torch.strided:
        raise ValueError(
            f"optimizer_offload=True steps dense gradients, and one of shape "
            f"{tuple(gradient.shape)} has layout {gradient.layout}; make it dense, with "
            f"sparse=False in nn.Embedding say"
        )
    return gradient


def _plain_step(optimizer: Optimizer) -> None:
    """Step without hooks: torch wraps a class's ``step`` to run them, and marks it as wrapped."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)
