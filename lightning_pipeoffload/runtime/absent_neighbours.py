"""The other ranks of a pipeline of which one runs alone.

What they send arrives as long after this rank has sent what it follows from as the plan says; so a
rank that its copies hold up is late to the end.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.accelerator import accelerator_module
from lightning_pipeoffload.runtime.payload import TensorSpec
from lightning_pipeoffload.runtime.timing import finished_at
from lightning_pipeoffload.schedule import COMPUTE, Action, Costs, Kind, Schedule, simulate
from lightning_pipeoffload.schedule.messages import RECVS, SENDS, send_of

_NUM_STREAMS = 16  # of messages that are under way at once
_CYCLES = 20_000_000

Delays = dict[Action, tuple[Action | None, float]]


class HostArrivals:
    """Messages whose arrival the host sleeps for: the CPU has computed what it was given."""

    def __init__(self, delays: Delays) -> None:
        self._delays = delays

    def start(self) -> None:
        """Begin a step."""
        self._since: dict[Action | None, float] = {None: time.perf_counter()}

    def note(self, send: Action) -> None:
        """Note that a message is sent now."""
        self._since[send] = time.perf_counter()

    def wait(self, receive: Action) -> None:
        """Wait for a message."""
        cause, delay = self._delays.get(receive, (None, 0.0))
        time.sleep(max(0.0, self._since[cause] + delay - time.perf_counter()))


class DeviceArrivals:
    """Messages that a kernel on a stream of their own delays: the host goes on.

    It would else wait for the device at each message, so that the device had nothing to do.
    """

    def __init__(self, delays: Delays, device: torch.device) -> None:
        self._caused: defaultdict[Action | None, list[tuple[Action, float]]] = defaultdict(list)
        for receive, (cause, delay) in delays.items():
            self._caused[cause].append((receive, delay))
        self._streams = cycle([torch.Stream(device) for _ in range(_NUM_STREAMS)])
        self._cycles_per_second = _measure_cycles()

    def start(self) -> None:
        """Begin a step."""
        self._arrivals: dict[Action, torch.Event] = {}
        self.note(None)

    def note(self, send: Action | None) -> None:
        """Let what follows from a message, or from the start of the step, begin its way."""
        sent = torch.accelerator.current_stream().record_event()
        for receive, delay in self._caused[send]:
            stream = next(self._streams)
            stream.wait_event(sent)
            with stream:
                _sleep(int(delay * self._cycles_per_second))
            self._arrivals[receive] = stream.record_event()

    def wait(self, receive: Action) -> None:
        """Wait for a message."""
        arrival = self._arrivals.pop(receive, None)
        if arrival is not None:
            torch.accelerator.current_stream().wait_event(arrival)


def _sleep(num_cycles: int) -> None:
    # Private: the only kernel that takes a time and nothing else of the device.
    accelerator_module()._sleep(num_cycles)


def _measure_cycles() -> float:
    _sleep(_CYCLES)
    started = finished_at()
    _sleep(_CYCLES)
    return _CYCLES / (finished_at() - started)


class AbsentNeighbours:
    """A transport whose other end is a plan: what it says that they send comes when it says.

    Args:
        delays: For a RECV, what this rank sends before it, and the seconds from there; for those
            without, the seconds from the start of the step.
        device: The device of the tensors.
    """

    def __init__(self, delays: Delays, device: torch.device) -> None:
        self._device = device
        is_host = device.type == "cpu"
        self._arrivals = HostArrivals(delays) if is_host else DeviceArrivals(delays, device)
        self._specs: dict[Action, list[TensorSpec]] = {}
        self.start_step()

    def start_step(self) -> None:
        """Begin to count time."""
        self._arrivals.start()

    def post(self, receive: Action, peer: int, specs: list[TensorSpec]) -> None:
        """Remember what a message looks like."""
        self._specs[receive] = specs

    def wait(self, receive: Action) -> list[Tensor]:
        """Wait until a message would be here; return tensors like it."""
        self._arrivals.wait(receive)
        specs = self._specs.pop(receive)
        return [_like(spec, self._device) for spec in specs]

    def send(self, send: Action, peer: int, tensors: list[Tensor]) -> None:
        """Note when a message is sent."""
        self._arrivals.note(send)

    def release(self, send: Action) -> None:
        """Nothing is kept."""

    def take_back(self) -> None:
        """Nothing is kept."""

    def finish_step(self) -> None:
        """Nothing is kept."""


def _like(spec: TensorSpec, device: torch.device) -> Tensor:
    if not spec.dtype.is_floating_point:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    return 1e-3 * torch.randn(spec.shape, dtype=spec.dtype, device=device)


def delays_of(plan: Schedule, rank: int, costs: Costs) -> Delays:
    """Say how long after what each message for a rank comes, as the plan has it.

    Args:
        plan: A lowered plan.
        rank: The rank that is there.
        costs: What the stages of all ranks cost.
    """
    ends = {e.action: e.end for e in simulate(plan, costs).events if e.action.kind in COMPUTE}
    sends = [action for action in plan[rank] if action.kind in SENDS]
    receives = [action for action in plan[rank] if action.kind in RECVS]
    delays: Delays = {}
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
