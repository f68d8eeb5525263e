"""One rank of a longer pipeline, which runs its own actions of a plan without the other ranks.

Stages, offload and copies are real. A message of another rank arrives after the delay that the plan
predicts. On the CPU the delay counts from the message of this rank on which the other one depends.
On a device, where a receive is a kernel, it counts from the receive. So where copies of this rank
take longer than planned, all that follows is later, to the end of the step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

from lightning_pipeoffload.runtime import TensorSpec
from lightning_pipeoffload.runtime.comm import Transport
from lightning_pipeoffload.runtime.device import ActionTimer, accelerator_module, synchronized_time
from lightning_pipeoffload.runtime.measure import CopySpeed, StageCosts, median_costs
from lightning_pipeoffload.runtime.run import ActivationMemory, Executor, Pipeline
from lightning_pipeoffload.runtime.step import Microbatch, set_indices_and_weights
from lightning_pipeoffload.schedule import (
    COMPUTE,
    RECVS,
    SENDS,
    Action,
    Costs,
    Kind,
    Schedule,
    lower,
    receives_to_post,
    recv_before,
    send_of,
    serialize_microbatches,
    simulate,
)

_CYCLES = 20_000_000

CutBatch = Callable[[int], Sequence[Microbatch]]
"""Returns so many microbatches, as the pipeline has cut them."""

Delays = dict[Action, tuple[Action | None, float]]
"""For each RECV the SEND of this rank from which its delay counts, and the delay in seconds. None:
from the start of the step."""


class Rehearsal:
    """Runs steps of one rank; other ranks' parameters may be shapes."""

    def __init__(self, pipeline: Pipeline, memory: ActivationMemory, cut_batch: CutBatch) -> None:
        self.pipeline = pipeline
        self.memory = memory
        self._cut_batch = cut_batch

    def run(self, plan: Schedule, costs: Costs | None, num_steps: int) -> float:
        """Run ``num_steps`` steps of a lowered plan after one to warm up.

        Args:
            costs: Costs of all ranks' stages, from which messages' delays are computed; None:
                messages have no delay.

        Returns:
            The median of the steps' seconds.
        """
        pipeline, device = self.pipeline, self.pipeline.device
        transport = AbsentNeighbours(plan, pipeline.rank, costs, device)
        microbatches = set_indices_and_weights(self._cut_batch(plan.num_microbatches))
        if not pipeline.committed:
            pipeline.commit()
        timer = ActionTimer(device)
        self.executor = Executor(pipeline.rank, pipeline.stages, transport, timer, self.memory)
        if costs is not None:
            self.executor.set_message_limits(plan, costs)
        seconds = []
        for _ in range(num_steps + 1):
            self.executor.set_timer(ActionTimer(device))
            started = synchronized_time()
            transport.start_step()
            self.executor.run(plan, microbatches)
            seconds.append(synchronized_time() - started)
            pipeline.module.zero_grad(set_to_none=False)
        return median(seconds[1:])

    def measure_stages(self, schedule: Schedule, speed: CopySpeed) -> dict[int, StageCosts]:
        """Return the costs of this rank's stages, from a schedule of a few microbatches."""
        self.run(lower(serialize_microbatches(schedule)), None, 1)
        return dict(median_costs(self.executor, speed).stages)


class AbsentNeighbours(Transport):
    """A transport that receives made-up values, at the times that a plan with these costs predicts.

    Without costs they are there at once.
    """

    def __init__(
        self, plan: Schedule, rank: int, costs: Costs | None, device: torch.device
    ) -> None:
        self._device = device
        self._arrivals: _HostArrivals | _DeviceArrivals
        if device.type == "cpu":
            self._arrivals = _HostArrivals(delays_of(plan, rank, costs) if costs else {})
        else:
            self._arrivals = _DeviceArrivals(
                receive_waits(plan, rank, costs) if costs else {}, device
            )
        self._specs: dict[Action, list[TensorSpec]] = {}
        self.start_step()

    def start_step(self) -> None:
        self._arrivals.start()

    def post(self, receive: Action, peer: int, specs: list[TensorSpec]) -> None:
        self._specs[receive] = specs
        self._arrivals.post(receive, peer)

    def wait(self, receive: Action) -> list[Tensor]:
        self._arrivals.wait(receive)
        return [_made_up(spec, self._device) for spec in self._specs.pop(receive)]

    def send(self, send: Action, peer: int, tensors: list[Tensor]) -> None:
        self._arrivals.note(send)


class _HostArrivals:
    """Delays messages by sleeping on the host; on CPU no computation is pending then."""

    def __init__(self, delays: Delays) -> None:
        self._delays = delays

    def start(self) -> None:
        self._since: dict[Action | None, float] = {None: time.perf_counter()}

    def note(self, send: Action) -> None:
        self._since[send] = time.perf_counter()

    def post(self, receive: Action, peer: int) -> None:
        pass

    def wait(self, receive: Action) -> None:
        cause, delay = self._delays.get(receive, (None, 0.0))
        time.sleep(max(0.0, self._since[cause] + delay - time.perf_counter()))


class _DeviceArrivals:
    """Delays messages by kernels that spin, one for each edge, as receives do.

    If the host waited for the device at each message instead, the device would become idle.
    """

    def __init__(self, waits: Mapping[Action, float], device: torch.device) -> None:
        self._waits = waits
        self._streams: defaultdict[int, torch.Stream] = defaultdict(lambda: torch.Stream(device))
        _sleep(_CYCLES)
        started = synchronized_time()
        _sleep(_CYCLES)
        self._cycles_per_second = _CYCLES / (synchronized_time() - started)

    def start(self) -> None:
        self._arrivals: dict[Action, torch.Event] = {}

    def note(self, send: Action) -> None:
        pass

    def post(self, receive: Action, peer: int) -> None:
        seconds = self._waits.get(receive, 0.0)
        if seconds <= 0:
            return
        stream = self._streams[peer]
        stream.wait_event(torch.accelerator.current_stream().record_event())
        with stream:
            _sleep(int(seconds * self._cycles_per_second))
        self._arrivals[receive] = stream.record_event()

    def wait(self, receive: Action) -> None:
        arrival = self._arrivals.pop(receive, None)
        if arrival is not None:
            torch.accelerator.current_stream().wait_event(arrival)


def _sleep(num_cycles: int) -> None:
    # Private: the only kernel that takes time and no other resource of the device.
    accelerator_module()._sleep(num_cycles)


def _made_up(spec: TensorSpec, device: torch.device) -> Tensor:
    if not spec.dtype.is_floating_point:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    return 1e-3 * torch.randn(spec.shape, dtype=spec.dtype, device=device)


def delays_of(plan: Schedule, rank: int, costs: Costs) -> Delays:
    """Return each message that ``rank`` receives, with its cause and its delay in seconds."""
    ends = {e.action: e.end for e in simulate(plan, costs).events if e.action.kind in COMPUTE}
    sends = [action for action in plan[rank] if action.kind in SENDS]
    delays: Delays = {}
    for receive in (action for action in plan[rank] if action.kind in RECVS):
        cause = _cause(receive, sends)
        since = ends[_computation_of(cause, ends)] if cause else 0.0
        delays[receive] = cause, ends[_computation_of(send_of(receive), ends)] - since
    return delays


def receive_waits(plan: Schedule, rank: int, costs: Costs) -> dict[Action, float]:
    """Return the seconds from each posted receive of ``rank`` to its message, as the plan predicts.

    A receive is posted when the plan expects it, but not before the message before it from the same
    rank is taken. 0 or less: the message is there by then.
    """
    timed = {e.action: e for e in simulate(plan, costs).events if e.action.kind in COMPUTE}
    ends = {action: event.end for action, event in timed.items()}
    expected = receives_to_post(plan, rank, costs)
    posted = {r: timed[action].start for action in expected for r in expected[action]}
    taken_at: dict[int, float] = {}  # by edge
    waits = {}
    for action in plan[rank]:
        receive = recv_before(plan, action)
        if receive is not None:
            source = plan.rank_of(send_of(receive).stage)
            since = max(posted[receive], taken_at.get(source, 0.0))
            waits[receive] = ends[_computation_of(send_of(receive), ends)] - since
            taken_at[source] = timed[action].start
    return waits


def _cause(receive: Action, sends: Sequence[Action]) -> Action | None:
    """Return the last message of this microbatch that the rank sends before ``receive``."""
    _, stage, microbatch = receive
    ours = [send for send in sends if send.microbatch == microbatch]
    down = [send for send in ours if send.kind is Kind.SEND_F]
    if receive.kind is Kind.RECV_F:
        return max((send for send in down if send.stage < stage), default=None)
    up = [send for send in ours if send.kind is Kind.SEND_B and send.stage > stage]
    return min(up) if up else max(down, default=None)


def _computation_of(send: Action, ends: dict[Action, float]) -> Action:
    """Return the action that computes the content of a message."""
    kinds = (Kind.F,) if send.kind is Kind.SEND_F else (Kind.B, Kind.BW)
    return next(action for k in kinds if (action := send._replace(kind=k)) in ends)
