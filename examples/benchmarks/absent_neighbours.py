"""The other ranks of a pipeline of which one runs, for benchmarks on one device.

What they send arrives as long after this rank has sent what it follows from as the plan says; so a
rank that its copies hold up is late to the end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.payload import TensorSpec
from lightning_pipeoffload.runtime.timing import DeviceClock, HostClock
from lightning_pipeoffload.schedule import COMPUTE, Action, Costs, Kind, Schedule, simulate
from lightning_pipeoffload.schedule.messages import RECVS, SENDS, send_of


class AbsentNeighbours:
    """A transport whose other end is a plan: what it says that they send comes when it says.

    Args:
        delays: for a RECV, what this rank sends before it, and the seconds from there; for those
            without, the seconds from the start of the step.
        device: of the tensors.
    """

    def __init__(
        self, delays: dict[Action, tuple[Action | None, float]], device: torch.device
    ) -> None:
        self._delays = delays
        self._device = device
        self._clock = HostClock() if device.type == "cpu" else DeviceClock()
        self._specs: dict[Action, list[TensorSpec]] = {}
        self.start_step()

    def start_step(self) -> None:
        """Begin to count time."""
        self._sent: dict[Action, Any] = {}
        self._started = self._clock.now()
        self._started_on_host = time.perf_counter()

    def post(self, receive: Action, peer: int, specs: list[TensorSpec]) -> None:
        """Remember what it looks like."""
        self._specs[receive] = specs

    def wait(self, receive: Action) -> list[Tensor]:
        """Wait until it would be here."""
        cause, delay = self._delays.get(receive, (None, 0.0))
        if cause is not None:
            delay += self._clock.seconds(self._started, self._sent[cause])
        time.sleep(max(0.0, self._started_on_host + delay - time.perf_counter()))
        specs = self._specs.pop(receive)
        return [1e-3 * torch.randn(s.shape, dtype=s.dtype, device=self._device) for s in specs]

    def send(self, send: Action, peer: int, tensors: list[Tensor]) -> None:
        """Note when."""
        self._sent[send] = self._clock.now()

    def release(self, send: Action) -> None:
        """Nothing is kept."""

    def finish_step(self) -> None:
        """Nothing is kept."""


def delays_of(plan: Schedule, rank: int, costs: Costs) -> dict[Action, tuple[Action | None, float]]:
    """Say how long after what each message for a rank comes, as the plan has it."""
    ends = {e.action: e.end for e in simulate(plan, costs).events if e.action.kind in COMPUTE}
    sends = [action for action in plan[rank] if action.kind in SENDS]
    receives = [action for action in plan[rank] if action.kind in RECVS]
    delays: dict[Action, tuple[Action | None, float]] = {}
    for receive in receives:
        cause = _cause(receive, sends)
        since = ends[_computed(cause, ends)] if cause else 0.0
        delays[receive] = cause, ends[_computed(send_of(receive), ends)] - since
    return delays


def _cause(receive: Action, sends: Sequence[Action]) -> Action | None:
    """Return the last message of this microbatch that the rank has sent before."""
    _, stage, microbatch = receive
    ours = [send for send in sends if send.microbatch == microbatch]
    down = [send for send in ours if send.kind is Kind.SEND_F]
    if receive.kind is Kind.RECV_F:
        return max((send for send in down if send.stage < stage), default=None)
    up = [send for send in ours if send.kind is Kind.SEND_B and send.stage > stage]
    return min(up) if up else max(down, default=None)


def _computed(send: Action, ends: dict[Action, float]) -> Action:
    """Return the action whose result a message is."""
    kinds = (Kind.F,) if send.kind is Kind.SEND_F else (Kind.B, Kind.BW)
    return next(action for k in kinds if (action := send._replace(kind=k)) in ends)
