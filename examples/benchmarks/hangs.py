"""Looks for hangs of several GPUs without one: hosts, streams and hardware queues as a model.

A host runs the executor, the transport and the stores of one rank over a plan, and enqueues what
they enqueue, in program order. A stream's items run in order. Streams share n hardware queues, in
which an item waits for what its stream has before it, and all after it wait too. A message ends
when both of its ends have begun (one that NCCL's buffers hold may be gone sooner), a collective
when all ranks have. Where ranks share layers, an F and a B have collectives on a stream of their
own, for which the compute stream waits. In a **device-wide wait** a host enqueues nothing before
its device has ended all that it was given: so do a first kernel load, compiling, and allocations.

The first step runs one microbatch at a time, as on a device; the plan follows, then evaluations::

    python -m examples.benchmarks.hangs [--ranks 2 4] [--schedules zb_v]
    python -m examples.benchmarks.hangs --tensor-ranks 2  # where ranks share the layers of a stage
    python -m examples.benchmarks.hangs --draws 60  # where memory is short in the middle of a plan
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from lightning_pipeoffload.runtime import TensorSpec
from lightning_pipeoffload.runtime.comm import (
    SMALLEST_BUFFER,
    BufferRing,
    Link,
    ProcessGroupTransport,
    RankMesh,
)
from lightning_pipeoffload.runtime.device import ActionTimer, CopyLanes, Lane
from lightning_pipeoffload.runtime.memory import HostMemory, OffloadSettings, SavedMemory
from lightning_pipeoffload.runtime.run import ActivationMemory, Executor, mailbox
from lightning_pipeoffload.schedule import (
    COMPUTE,
    SCHEDULES,
    UNMEASURED,
    Costs,
    Schedule,
    add_final_actions,
    build,
    forward_only,
    lower,
    offload_activations,
    receives_to_post,
    serialize_microbatches,
)

CPU = torch.device("cpu")
_COLLECTIVES = 2  # of an F or B, over the ranks that share layers
SPEC = TensorSpec(torch.Size((1,)), torch.float32, True, gets_gradient=True)
QUEUES = (1, 8, 32)
COLD, PLAN, AGAIN, COLD_EVALUATION, EVALUATION, EVALUATION_AGAIN = range(6)


class Computing(NamedTuple):
    """What a host enqueues on the compute stream, before which it may wait for the device."""

    step: int
    kind: str
    stage: int
    microbatch: int
    tensor_rank: int = 0


Waits = Callable[[Computing], bool]


@dataclass
class Item:
    """What a host enqueues, or a device-wide wait where there is no stream.

    Attributes:
        label: What it is, in words.
        stream: The name of the stream.
        after: The items of this rank that it waits for.
        meets: What it meets on other ranks; None: nothing.
        num_meeting: On how many ranks.
        computing: What a device-wide wait is for; None: it is always there.
    """

    label: str
    stream: str = ""
    after: tuple[int, ...] = ()
    meets: Any = None
    num_meeting: int = 1
    computing: Computing | None = None


@dataclass
class Host:
    """One rank's host, and all that it enqueues.

    Attributes:
        items: The items, in program order.
        streams: The streams, in the order in which they were made.
        step: The step that it is in.
        num_allocations: Allocations on the host in the middle of a plan.
        buffers: How many buffers of messages there are after each step.
        has_memory: Whether it has taken the memory of its plan, and so waits for none in it.
        sends_end: What a host hears that asks whether a message is sent: it may be far ahead of its
            device, or never.
        tensor_rank: Its rank among those that share its layers.
    """

    sends_end: bool = False
    tensor_rank: int = 0
    has_memory: bool = False
    items: list[Item] = field(default_factory=list)
    buffers: list[int] = field(default_factory=list)
    streams: dict[str, int] = field(default_factory=lambda: {"compute": 0})
    step: int = 0
    is_in_plan: bool = False
    num_allocations: int = 0
    _last: dict[str, int] = field(default_factory=dict)

    def run(self, stream: str, label: str, meets: Any = None, num_meeting: int = 1) -> int:
        """Enqueue a kernel or a copy; return its number."""
        return self._enqueue(Item(label, stream, self._before(stream), meets, num_meeting))

    def record_event(self, stream: str) -> int | None:
        """Return the last item of a stream, as an event does."""
        return self._last.get(stream)

    def hold(self, stream: str, moment: int | None, label: str) -> None:
        """Let a stream wait for an item of another one."""
        if moment is not None:
            self._enqueue(Item(label, stream, (*self._before(stream), moment)))

    def wait_for_device(self, label: str, computing: Computing | None = None) -> None:
        """Wait for all that the device was given."""
        self.items.append(Item(label, computing=computing))

    def compute(self, kind: str, stage: int, microbatch: int) -> None:
        """Enqueue an F, B or W."""
        label = f"{stage}{kind}{microbatch}"
        if not (self.has_memory and self.step in (PLAN, AGAIN)):
            computing = Computing(self.step, kind, stage, microbatch, self.tensor_rank)
            self.wait_for_device(label, computing)
        self.run("compute", label)

    def start_together(self, stream: str, label: str, meets: Any, num_meeting: int) -> int:
        """Enqueue what NCCL runs on a stream of its own, after what is computed so far."""
        self.hold(stream, self.record_event("compute"), label)
        return self.run(stream, label, meets, num_meeting)

    def _before(self, stream: str) -> tuple[int, ...]:
        self.streams.setdefault(stream, len(self.streams))
        return (self._last[stream],) if stream in self._last else ()

    def _enqueue(self, item: Item) -> int:
        self.items.append(item)
        self._last[item.stream] = len(self.items) - 1
        return self._last[item.stream]


@dataclass
class Work:
    """A message or collective under way."""

    host: Host
    item: int
    label: str

    def wait(self) -> None:
        """Let the compute stream wait, as torch does for NCCL."""
        self.host.hold("compute", self.item, self.label)

    def is_completed(self) -> bool:
        """Say whether it has ended."""
        return self.host.sends_end


class EdgeGroup:
    """NCCL's communicator of a directed edge: messages meet in their order, whatever their tags."""

    def __init__(self, host: Host, edge: Any) -> None:
        self._host, self._edge, self._numbers = host, edge, count()

    def send(self, tensors: list[Tensor], place: int, tag: int) -> Work:
        """Start sending."""
        return self._start("a message to", self._edge[-1], tag)

    def recv(self, tensors: list[Tensor], place: int, tag: int) -> Work:
        """Start receiving."""
        return self._start("a message from", self._edge[-2], tag)

    def _start(self, what: str, peer: int, tag: int) -> Work:
        label = f"{what} rank {peer}"
        meets = self._edge, next(self._numbers), tag
        item = self._host.start_together(f"edge {self._edge}", label, meets, 2)
        return Work(self._host, item, label)


class ModelTransport(ProcessGroupTransport):
    """The transport, over communicators of the model."""

    def __init__(self, host: Host, mesh: RankMesh) -> None:
        self._host = host
        pairs = [*zip(mesh.stage_ranks, mesh.stage_ranks[1:], strict=False)]
        edges = {edge for a, b in pairs for edge in ((a, b), (b, a)) if a != b}
        super().__init__(mesh, edges, CPU)

    def _buffers(self) -> BufferRing:
        return BufferRing(CPU)

    def _make_groups(self) -> dict[tuple[int, int], Any]:
        pipeline, rank = self._mesh.pipeline_index, self._mesh.rank
        own = [edge for edge in sorted(self._edges) if rank in edge]
        found = {edge: EdgeGroup(self._host, (pipeline, *edge)) for edge in own}
        return {edge: found.get(edge) for edge in self._edges}

    def _link(self, group: Any, global_rank: int) -> Link:
        return Link(group, 0, global_rank, CPU, ring=self._ring)

    def _open_link(self, group: Any, rank: int, exchange: str) -> Link:
        return self._link(group, self._mesh.global_ranks[rank])


class ModelLane(Lane):
    """A stream for copies."""

    def __init__(self, host: Host, name: str) -> None:
        self._host, self._name = host, name

    def wait_for_compute(self) -> None:
        """Wait for the compute stream."""
        self.wait_for(self._host.record_event("compute"))

    def wait_for(self, moment: int | None) -> None:
        """Wait for an item of any stream."""
        self._host.hold(self._name, moment, self._name)

    def copy(self, target: Tensor, source: Tensor, description: str) -> None:
        """Enqueue a copy."""
        self._host.run(self._name, f"a copy on {self._name}")

    def record_event(self) -> int | None:
        """Return the last copy."""
        return self._host.record_event(self._name)

    def make_compute_wait(self, moment: int | None) -> None:
        """Let the compute stream wait for a copy."""
        self._host.hold("compute", moment, f"a copy on {self._name}")


class ModelMemory(HostMemory):
    """Pinned memory, whose allocation waits for the device."""

    def __init__(self, host: Host) -> None:
        super().__init__(pinned=False)
        self._host = host

    def _pop_piece(self, size: int) -> Tensor:
        num_before = self.num_allocations
        piece = super()._pop_piece(size)
        if self.num_allocations > num_before:
            self._host.num_allocations += self._host.is_in_plan
            self._host.wait_for_device("a pinned allocation")
        return piece


class ModelStage:
    """A stage that computes nothing and saves a tensor for B and one for W."""

    def __init__(
        self, host: Host, index: int, num_stages: int, layers: SharedLayers | None = None
    ) -> None:
        self._host, self._index, self._layers = host, index, layers
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.memories = {0: SavedMemory()}
        self._kept: dict[int, Any] = {}
        self.in_flight: dict[int, Any] = {}

    def owned_tensors(self) -> list[Tensor]:
        """Return no parameters."""
        return []

    def record_of(self, microbatch: Any) -> SimpleNamespace:
        """Return what the stage receives, and gets gradients of."""
        specs_in, gradient_specs = [SPEC] * (not self.is_first), [SPEC] * (not self.is_last)
        return SimpleNamespace(specs_in=specs_in, gradient_specs=gradient_specs)

    def forward(
        self, microbatch: Any, receive: Callable[[], Any], keep: bool, store: Any = None
    ) -> list[Tensor]:
        """Enqueue an F, once its message is waited for."""
        if not self.is_first:
            receive()
        self._compute("F", microbatch)
        if store:
            saved = store.pack(torch.empty(2)), store.pack_weight_input(torch.empty(2))
            self._kept[microbatch.index] = saved
        if keep:
            self.in_flight[microbatch.index] = SimpleNamespace(store=store)
            self.memories[0].measure_forward_if_due(store)
        return [torch.empty(1)]

    def backward(self, microbatch: Any, gradients: list[Tensor], fused: bool) -> list[Tensor]:
        """Enqueue a B or BW."""
        self._compute("B", microbatch)
        store = self.in_flight[microbatch.index].store
        if store:
            for_w = self._kept.pop(microbatch.index)[1]
            if not fused:
                gradient = store.keep_until_w(torch.empty(2))
                self._kept[microbatch.index] = for_w, gradient
            del for_w
        self.memories[0].measure_backward_if_due(SimpleNamespace(flops=0), store)  # type: ignore[arg-type]
        return [] if self.is_first else [torch.empty(1)]

    def backward_weight(self, microbatch: Any) -> None:
        """Enqueue a W."""
        self._host.compute("W", self._index, microbatch.index)
        self._kept.pop(microbatch.index, None)

    def run_regrouped_weights(self, microbatches: Sequence[Any], final: Any) -> None:
        """Enqueue the last W's."""
        for microbatch in microbatches:
            self.backward_weight(microbatch)

    def drop_microbatch(self, microbatch: Any) -> None:
        """Drop its state."""
        del self.in_flight[microbatch.index]

    def _compute(self, kind: str, microbatch: Any) -> None:
        self._host.compute(kind, self._index, microbatch.index)
        if self._layers is not None:
            self._layers.compute(f"{self._index}{kind}{microbatch.index}")


class SharedLayers:
    """The collectives of an F or B over the ranks that share its layers, and what follows each."""

    def __init__(self, host: Host, mesh: RankMesh) -> None:
        self._host, self._num = host, mesh.num_tensor_ranks
        self._stage_ranks, self._numbers = (mesh.replica, mesh.rank), count()
        host._before("shared layers")  # the communicator is there before those of messages

    def compute(self, action: str) -> None:
        """Enqueue the rest of an action, whose first kernels are enqueued."""
        for _ in range(_COLLECTIVES):
            label = f"a sum in {action} over the ranks that share layers"
            meets = "layers", self._stage_ranks, next(self._numbers), action
            item = self._host.start_together("shared layers", label, meets, self._num)
            Work(self._host, item, label).wait()
            self._host.run("compute", action)


class ModelReduction:
    """The sums over replicas, in the same order on all of them."""

    def __init__(self, host: Host, rank: tuple[int, int], num_replicas: int) -> None:
        self._host, self._rank, self._num = host, rank, num_replicas
        self._works: list[Work] = []

    def mark_gradients_final(self, stage: int) -> None:
        """Start the sum of a stage."""
        label = f"the sum of stage {stage} over the replicas"
        meets = "sum", self._rank, self._host.step, len(self._works)
        item = self._host.start_together("sums", label, meets, self._num)
        self._works.append(Work(self._host, item, label))

    def wait(self) -> None:
        """Let the compute stream wait for all sums."""
        for work in self._works:
            work.wait()
        self._works.clear()


@dataclass(frozen=True)
class Variant:
    """What is run.

    Attributes:
        schedule: The schedule.
        num_ranks: Ranks of a pipeline.
        offloads: Whether half of the activations go to the host.
        num_replicas: How many pipelines there are.
        ties_weights: Whether the first and the last stage share a weight.
        as_planned: Whether the first step is the plan's, without a step that measures before it.
        num_microbatches: Of a batch; 0: two for each rank.
        sends_end: What hosts hear that ask whether a message is sent.
        takes_memory: Whether hosts wait for no memory in the middle of a plan.
        num_tensor_ranks: Ranks that share the layers of a stage.
    """

    schedule: str
    num_ranks: int
    offloads: bool = False
    num_replicas: int = 1
    ties_weights: bool = False
    as_planned: bool = False
    num_microbatches: int = 0
    sends_end: bool = False
    takes_memory: bool = False
    num_tensor_ranks: int = 1

    def scheduled(self) -> Schedule:
        """Return the schedule of a training step."""
        count = self.num_microbatches or 2 * self.num_ranks
        schedule = build(self.schedule, self.num_ranks, count)
        if self.offloads and not schedule.has_copies:
            schedule, _ = offload_activations(schedule, UNMEASURED, "half")
        return schedule

    def plans(self) -> dict[int, Schedule]:
        """Return the lowered plan of each step."""
        schedule = self.scheduled()
        single = serialize_microbatches(schedule)
        trained = {COLD: lower(single), PLAN: lower(schedule)}
        if self.num_replicas > 1:
            trained = {step: add_final_actions(plan) for step, plan in trained.items()}
        if self.as_planned:
            return {PLAN: trained[PLAN]}
        evaluation = lower(forward_only(schedule))
        return {
            **trained,
            AGAIN: trained[PLAN],
            COLD_EVALUATION: lower(forward_only(single)),
            EVALUATION: evaluation,
            EVALUATION_AGAIN: evaluation,
        }

    def enqueue(self) -> list[Host]:
        """Let all hosts run all steps; return what they have enqueued."""
        plans = self.plans()
        num_hosts = self.num_ranks * self.num_replicas * self.num_tensor_ranks
        return [self._run(rank, plans) for rank in range(num_hosts)]

    def _run(self, global_rank: int, plans: dict[int, Schedule]) -> Host:
        plan, num_tensor_ranks = plans[PLAN], self.num_tensor_ranks
        mesh = RankMesh(
            plan, global_rank, None, self.num_replicas, num_tensor_ranks=num_tensor_ranks
        )
        host = Host(self.sends_end, mesh.tensor_rank)
        layers = SharedLayers(host, mesh) if num_tensor_ranks > 1 else None
        lanes = CopyLanes(ModelLane(host, "d2h"), ModelLane(host, "h2d"))
        settings = OffloadSettings(CPU, lanes, ModelMemory(host), largest_to_stay=0)
        memory, transport = ActivationMemory(settings), ModelTransport(host, mesh)
        num_stages, own = plan.num_stages, plan.stages_of(mesh.rank)
        stages: Any = {stage: ModelStage(host, stage, num_stages, layers) for stage in own}
        runs = Executor(mesh.rank, stages, transport, ActionTimer(CPU), memory)
        reduction = ModelReduction(host, (mesh.rank, mesh.tensor_rank), self.num_replicas)
        reduces: Any = reduction if self.num_replicas > 1 else None
        microbatches: Any = [
            SimpleNamespace(index=i, part=(), has_result=True) for i in range(plan.num_microbatches)
        ]
        runs.set_message_limits(self.scheduled(), Costs.unit())
        for host.step, step_plan in plans.items():
            memory.set_measure_all(host.step == COLD)
            if host.step == PLAN and not self.as_planned:
                host.wait_for_device("the memory of plans, which is taken")
                host.has_memory = self.takes_memory
            runs.start(step_plan, microbatches, reduces)
            runs.expect_messages(step_plan[mesh.rank])
            host.is_in_plan = True  # from the first action on, before which memory is reserved
            for action in step_plan[mesh.rank]:
                runs.execute(action)
            runs.end()
            host.is_in_plan = False
            host.buffers.append(transport.buffer_bytes // SMALLEST_BUFFER)
            if not step_plan.is_forward_only:
                self._end_step(host, mesh, reduction)
        return host

    def _end_step(self, host: Host, mesh: RankMesh, reduction: ModelReduction) -> None:
        reduction.wait()
        ends = {mesh.stage_ranks[0], mesh.stage_ranks[-1]}
        groups = [("tied weights' gradients", ends)] if self.ties_weights else []
        for what, ranks in [*groups, ("the norm", {*range(self.num_ranks)})]:
            if mesh.rank in ranks and len(ranks) > 1:
                meets = what, mesh.pipeline_index, host.step
                Work(host, host.start_together(what, what, meets, len(ranks)), what).wait()
        if self.num_tensor_ranks > 1:
            SharedLayers(host, mesh).compute(f"the norm of step {host.step}")
        host.run("compute", "the optimizer's step")


class Devices:
    """The devices of all ranks, whose hardware queues take what the hosts enqueue."""

    def __init__(self, hosts: Sequence[Host], num_queues: int, waits: Waits) -> None:
        self._hosts, self._waits, self._num_queues = hosts, waits, num_queues
        self._places = [0] * len(hosts)
        self._left = [0] * len(hosts)
        self._done = [bytearray(len(host.items)) for host in hosts]
        self._queues: list[defaultdict[int, deque[int]]] = [defaultdict(deque) for _ in hosts]
        self._meeting: defaultdict[Any, list[tuple[int, int]]] = defaultdict(list)

    def run(self) -> str:
        """Run all; return where they hang, or nothing."""
        due = deque(range(len(self._hosts)))
        while due:
            rank = due.popleft()
            for other in self._advance(rank):
                if other not in due:
                    due.append(other)
        stuck = self._stuck()
        return f"hangs at {stuck}" if stuck else ""

    def _advance(self, rank: int) -> set[int]:
        """Go on with a rank as far as it can; return the ranks that may go on by that."""
        others: set[int] = set()
        while self._enqueue(rank) or self._dequeue(rank, others):
            pass
        return others - {rank}

    def _enqueue(self, rank: int) -> bool:
        host, start = self._hosts[rank], self._places[rank]
        for place in range(start, len(host.items)):
            item = host.items[place]
            if item.stream:
                queue = host.streams[item.stream] % self._num_queues
                self._queues[rank][queue].append(place)
                self._left[rank] += 1
            elif self._left[rank] and self._is_waiting(item):
                break
            self._places[rank] = place + 1
        return self._places[rank] > start

    def _is_waiting(self, item: Item) -> bool:
        return item.computing is None or self._waits(item.computing)

    def _dequeue(self, rank: int, others: set[int]) -> bool:
        items, done, has_run = self._hosts[rank].items, self._done[rank], False
        for queue in self._queues[rank].values():
            while queue and all(done[before] for before in items[queue[0]].after):
                place, has_run = queue.popleft(), True
                item = items[place]
                arrived = self._meeting[item.meets] if item.meets else []
                arrived.append((rank, place))
                for other, number in arrived if len(arrived) == item.num_meeting else ():
                    self._done[other][number] = 1
                    self._left[other] -= 1
                    others.add(other)
        return has_run

    def _stuck(self) -> str:
        for host, place in zip(self._hosts, self._places, strict=True):
            if place < len(host.items):
                return host.items[place].label
        for host, queues in zip(self._hosts, self._queues, strict=True):
            for queue in filter(None, queues.values()):
                return host.items[queue[0]].label
        return "a message that never comes" if any(self._left) else ""


def nowhere(computing: Computing) -> bool:
    """Nowhere: steps of shapes that have run before."""
    return False


def every_new_action(computing: Computing) -> bool:
    """In every action of the steps whose shapes are new, which run one microbatch at a time."""
    return computing.step in (COLD, COLD_EVALUATION)


def every_new_action_of_one(computing: Computing) -> bool:
    """In them on the first of the ranks that share layers, as if it alone compiled."""
    return every_new_action(computing) and not computing.tensor_rank


def first_of_each_stage(computing: Computing) -> bool:
    """In the first F, B and W of each stage by the plan itself, as if kernels were loaded there."""
    return computing.step == PLAN and computing.microbatch == 0


def one_microbatch(computing: Computing) -> bool:
    """In one microbatch's actions by the plan itself, as if it was shorter and compiled there."""
    return computing.step == PLAN and computing.microbatch == 1


def every_action(computing: Computing) -> bool:
    """In every action of every step."""
    return True


RUNS: tuple[Waits, ...] = (nowhere, every_new_action)
"""Where hosts may wait for their devices as steps are run."""

RUNS_OF_TENSOR_RANKS: tuple[Waits, ...] = (*RUNS, every_new_action_of_one)
"""Where they may where ranks share the layers of a stage."""

BY_PLAN: tuple[Waits, ...] = (first_of_each_stage, one_microbatch, every_action)
"""Where they would wait if steps with new shapes were run by the plan."""


def outcomes(variant: Variant, waits: Sequence[Waits], queues: Sequence[int]) -> Iterator[str]:
    """Yield for each kind of wait where a variant hangs, or nothing.

    Args:
        variant: What is run.
        waits: Where hosts wait for their devices.
        queues: The numbers of hardware queues to try.
    """
    hosts = variant.enqueue()
    for wait in waits:
        found = ((n, Devices(hosts, n, wait).run()) for n in queues)
        yield next((f"{stuck} with {n} queues" for n, stuck in found if stuck), "")


def two_neighbours(plan: Schedule, rng: random.Random) -> Waits:
    """Return that two neighbours wait, each in three actions of two steps by the plan."""
    rank = rng.randrange(plan.num_ranks - 1)
    chosen = set()
    for each in 3 * (rank, rank + 1):
        action = rng.choice([action for action in plan[each] if action.kind in COMPUTE])
        kind = action.kind.value[0]  # BW is a B here
        step = rng.choice((PLAN, AGAIN))
        chosen.add(Computing(step, kind, action.stage, action.microbatch))
    return chosen.__contains__


def num_hanging(variant: Variant, num_draws: int, posted_early: bool = False) -> int:
    """Return in how many draws a variant hangs where memory is short on two neighbours.

    Args:
        posted_early: Whether receives are posted as soon as their messages may come.
    """
    expected = (lambda *_: None) if posted_early else receives_to_post
    with mock.patch.object(mailbox, "receives_to_post", expected):
        hosts = variant.enqueue()
    plan, rng = variant.plans()[PLAN], random.Random(variant.num_ranks)
    draws = (two_neighbours(plan, rng) for _ in range(num_draws))
    return sum(bool(Devices(hosts, QUEUES[-1], waits).run()) for waits in draws)


def row_of_draws(schedule: str, num_ranks: int, num_draws: int) -> list[int]:
    """Return hangs with receives posted early, when they are due, and with memory taken."""
    variant = Variant(schedule, num_ranks)
    return [
        num_hanging(variant, num_draws, posted_early=True),
        num_hanging(variant, num_draws),
        num_hanging(replace(variant, takes_memory=True), num_draws),
    ]


def variants(schedule: str, num_ranks: int, num_tensor_ranks: int = 1) -> list[Variant]:
    """Return a schedule with and without offload, replicas and tied weights."""
    return [
        Variant(schedule, num_ranks, *choice, num_tensor_ranks=num_tensor_ranks)
        for choice in product((False, True), (1, 2), (False, True))
    ]


def columns(num_tensor_ranks: int) -> tuple[Waits, ...]:
    """Return the kinds of waits to try."""
    return (*(RUNS_OF_TENSOR_RANKS if num_tensor_ranks > 1 else RUNS), *BY_PLAN)


def row(schedule: str, num_ranks: int, num_tensor_ranks: int = 1) -> list[str]:
    """Return for each kind of wait whether all variants of a schedule run, or where one hangs."""
    waits, of = columns(num_tensor_ranks), variants(schedule, num_ranks, num_tensor_ranks)
    found = [list(outcomes(variant, waits, QUEUES)) for variant in of]
    return [next(filter(None, of_wait), "runs") for of_wait in zip(*found, strict=True)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--schedules", nargs="+", default=[*SCHEDULES])
    parser.add_argument("--tensor-ranks", type=int, default=1)
    parser.add_argument("--draws", type=int, default=0)
    arguments = parser.parse_args()
    cases = product(arguments.schedules, arguments.ranks)
    if arguments.draws:
        print("| schedule | ranks | posted early | when due | memory taken |")
        print("|---" * 5 + "|")
        for case in cases:
            counts = [*case, *row_of_draws(*case, arguments.draws)]
            print("|", " | ".join(map(str, counts)), "|", flush=True)
        return
    names = [wait.__name__.replace("_", " ") for wait in columns(arguments.tensor_ranks)]
    print("| schedule | ranks |", " | ".join(names), "|")
    print("|---" * (2 + len(names)) + "|")
    for schedule, num_ranks in cases:
        cells = row(schedule, num_ranks, arguments.tensor_ranks)
        print(f"| {schedule} | {num_ranks} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
