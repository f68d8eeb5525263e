"""The problem of the solver, and its costs and times in whole numbers: ticks and grains of memory.

Also bounds that no plan is faster than.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from math import floor, gcd, inf

from ..actions import ACTIVATION, COMPUTE_LANE, COPIES, KINDS, WAITING, Action, Kind, MemoryPart
from ..costs import Costs
from ..schedule import Schedule, stages_on
from ..search.problem import ROUNDING
from ..simulation.memory import part_sizes, peak_memory
from ..simulation.simulate import Simulation, simulate, steady_period

_Seconds = Mapping[Kind, Sequence[float]]
"""Seconds of F, B and W of every stage."""


def earliest_starts(seconds: _Seconds, latencies: Sequence[float]) -> dict[Kind, list[float]]:
    """Return when each stage can start its first F, B and W at the earliest.

    Args:
        seconds: Seconds of F, B and W of every stage.
        latencies: Seconds of the message after each stage.
    """
    forward = [0.0]
    for second, latency in zip(seconds[Kind.F], latencies, strict=True):
        forward.append(forward[-1] + second + latency)
    last = len(latencies) - 1
    backward = [forward[last] + seconds[Kind.F][last]]
    for stage in range(last - 1, -1, -1):
        backward.append(backward[-1] + seconds[Kind.B][stage + 1] + latencies[stage])
    backward.reverse()
    weights = [start + b for start, b in zip(backward, seconds[Kind.B], strict=True)]
    return {Kind.F: forward[:-1], Kind.B: backward, Kind.W: weights}


def makespan_lower_bound(
    seconds: _Seconds, latencies: Sequence[float], placement: tuple[int, ...], num_microbatches: int
) -> float:
    """Return a lower bound of the makespan: the latest of each rank's first start plus its work."""
    first = earliest_starts(seconds, latencies)[Kind.F]

    def end(rank: int) -> float:
        start = min(first[stage] for stage in stages_on(placement, rank))
        return start + num_microbatches * _work(seconds, placement, rank)

    return max(map(end, range(max(placement) + 1)))


def span_lower_bound(
    seconds: _Seconds, latencies: Sequence[float], placement: tuple[int, ...], num_microbatches: int
) -> float:
    """Return the seconds from a rank's first F of a step to its last W at least.

    Until a gradient has come back from the last stage, a rank runs F's alone; its B's and W's
    follow. So few microbatches leave a bubble, with or without a barrier between steps.
    """
    first = earliest_starts(seconds, latencies)

    def span(rank: int) -> float:
        stages = stages_on(placement, rank)
        wait = first[Kind.B][max(stages)] - first[Kind.F][min(stages)]
        backward = sum(seconds[kind][stage] for kind in (Kind.B, Kind.W) for stage in stages)
        return wait + num_microbatches * backward

    return max(map(span, range(max(placement) + 1)))


def max_rank_work(seconds: _Seconds, placement: tuple[int, ...], num_microbatches: int) -> float:
    """Return the seconds of a step's work on the rank that has most of it."""
    ranks = range(max(placement) + 1)
    return num_microbatches * max(_work(seconds, placement, rank) for rank in ranks)


def memory_limited_lower_bound(
    costs: Costs, placement: tuple[int, ...], num_microbatches: int, limit: float, copies: bool
) -> float:
    """Return the seconds that a step takes at least, since a rank holds no more than ``limit``.

    From F to B of a stage an activation waits for the F and B of all later stages. Activations
    times these seconds have to fit into the step times the limit, but for those that the copy lanes
    take away meanwhile, where there are copies: those that wait longest.
    """
    num_stages = len(placement)
    seconds, latencies = costs.seconds_by_kind(num_stages), costs.latencies(placement)
    pairs = zip(seconds[Kind.F], seconds[Kind.B], latencies, strict=True)
    waits = [*accumulate(f + b + 2 * latency for f, b, latency in [*pairs][::-1])][::-1]
    moves, sizes = _move_seconds(costs, num_stages), costs.per_stage("activation", num_stages)

    def least(rank: int) -> float:
        of_stages = [(sizes[s] * waits[s], moves[s]) for s in stages_on(placement, rank)]
        held, moved = sum(size for size, _ in of_stages), 0.0
        for size, move in (
            sorted(of_stages, key=_saving_per_copy_second, reverse=True) if copies else ()
        ):
            if held - size <= limit * (moved + move):
                share = (held - limit * moved) / ((size + limit * move) or 1.0)
                return moved + max(0.0, share) * move
            held, moved = held - size, moved + move
        return max(moved, held / limit) if limit else inf

    return num_microbatches * max(map(least, range(max(placement) + 1)))


def copy_seconds_lower_bound(schedule: Schedule, costs: Costs, limit: float) -> float:
    """Return the seconds of a rank's copies at least, so that its order keeps a limit.

    What exceeds the limit leaves the activations whose B is last, for these are away longest.
    """
    moves = _move_seconds(costs, schedule.num_stages)
    sizes = costs.per_stage("activation", schedule.num_stages)
    most = 0.0
    for rank, order in enumerate(schedule):
        ends = {a[1:]: i for i, a in enumerate(order) if a.kind in (Kind.B, Kind.BW)}
        there: dict[int, float] = {}  # bytes on the device, by the place of their B
        latest: list[int] = []
        total = moved = 0.0
        for place, action in enumerate(order):
            if action.kind is Kind.F:
                end, size = ends[action[1:]], sizes[action.stage]
                there[end], total = size, total + size
                heappush(latest, -end)
                while total > limit and latest:
                    away = min(there[-latest[0]], total - limit)
                    there[-latest[0]] -= away
                    total, moved = total - away, moved + away
                    if not there[-latest[0]]:
                        heappop(latest)
            elif action.kind in (Kind.B, Kind.BW):
                total -= there[place]
                there[place] = 0.0
        rates = [moves[s] / sizes[s] for s in schedule.stages_of(rank) if sizes[s]]
        most = max(most, moved * min(rates, default=0.0))
    return most


def _move_seconds(costs: Costs, num_stages: int) -> list[float]:
    there, back = (costs.per_stage(name, num_stages) for name in ("offload", "reload"))
    of_both = sum if costs.copy_lanes == 1 else max
    return [of_both(pair) for pair in zip(there, back, strict=True)]


def _saving_per_copy_second(of_stage: tuple[float, float]) -> float:
    held, move = of_stage
    return held / move if move else inf


def _work(seconds: _Seconds, placement: tuple[int, ...], rank: int) -> float:
    stages = stages_on(placement, rank)
    return sum(of_kind[stage] for of_kind in seconds.values() for stage in stages)


@dataclass(frozen=True)
class PlanProblem:
    """A pipeline whose fastest plan is sought.

    Attributes:
        num_microbatches: Microbatches of one step.
        placement: The rank of every stage.
        costs: The costs of the stages.
        memory_limit: The most memory of a rank; None: any.
        has_barrier: Whether no rank begins a step before all have ended the one before. If not,
            the time from one step to the next is what counts.
    """

    num_microbatches: int
    placement: tuple[int, ...]
    costs: Costs
    memory_limit: float | None = None
    has_barrier: bool = True

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return max(self.placement) + 1

    @property
    def num_chunks(self) -> int:
        """Stages per rank."""
        return len(self.placement) // self.num_ranks

    def fits_memory_limit(self, plan: Schedule) -> bool:
        """Whether a plan keeps the memory limit."""
        limit = inf if self.memory_limit is None else self.memory_limit * (1 + ROUNDING)
        return max(peak_memory(plan, self.costs)) <= limit

    @property
    def lower_bound(self) -> float:
        """Seconds that no plan takes less than."""
        costs, placement = self.costs, self.placement
        seconds, latencies = costs.seconds_by_kind(len(placement)), costs.latencies(placement)
        if not self.has_barrier:
            return max_rank_work(seconds, placement, self.num_microbatches)
        return makespan_lower_bound(seconds, latencies, placement, self.num_microbatches)

    def seconds(self, plan: Schedule) -> float:
        """Return the seconds from one step to the next."""
        if not self.has_barrier:
            return steady_period(plan, self.costs, has_barrier=False)
        return simulate(plan, self.costs).makespan


_FEWEST_TICKS, _MOST_TICKS = 20, 60  # of a mean F, B or W: more are slower, and gain nothing
_MOST_GRAINS = 2**32
_ROUNDING = 1e-9


@dataclass(frozen=True)
class IntegerCosts:
    """The costs of a placement's stages, in ticks and grains.

    Attributes:
        seconds: The ticks of F, B and W of every stage.
        latencies: The ticks from each stage to the next one.
        offload: The ticks of each stage's copies to the host, by the parts that are copied.
        reload: The same for the copies back.
        sizes: The grains of each stage's parts, by their set.
        limit: The most grains of a rank; None: any.
    """

    placement: tuple[int, ...]
    seconds: dict[Kind, tuple[int, ...]]
    latencies: tuple[int, ...]
    offload: tuple[tuple[int, ...], ...]
    reload: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    limit: int | None

    @classmethod
    def rounded(
        cls, costs: Costs, placement: tuple[int, ...], memory_limit: float | None
    ) -> IntegerCosts:
        """Round costs, and a memory limit."""
        num_stages = len(placement)
        seconds = costs.seconds_by_kind(num_stages)
        tick = _tick([second for of_kind in seconds.values() for second in of_kind])
        sizes = part_sizes(costs, num_stages).of
        whole_sizes, limit = _sizes_in_grains(sizes, memory_limit)

        def copies(name: str) -> tuple[tuple[int, ...], ...]:
            stages = zip(costs.per_stage(name, num_stages), sizes, strict=True)
            return tuple(
                tuple(round(second * _share(size, of) / tick) for size in of)
                for second, of in stages
            )

        return cls(
            placement,
            {kind: tuple(round(s / tick) for s in of_kind) for kind, of_kind in seconds.items()},
            tuple(round(second / tick) for second in costs.latencies(placement)),
            copies("offload"),
            copies("reload"),
            whole_sizes,
            limit,
        )

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return max(self.placement) + 1

    def copy(self, action: Action, copies: frozenset[Kind]) -> int:
        """Return the ticks of a copy; ``copies``: all kinds of its stage and microbatch."""
        kind, stage, _ = action
        if kind is Kind.OFFLOAD:
            return self.offload[stage][ACTIVATION]
        if kind is Kind.OFFLOAD_W:
            return self.offload[stage][MemoryPart.GRADIENT if Kind.OFFLOAD in copies else WAITING]
        if kind is Kind.RELOAD_W:
            return self.reload[stage][WAITING if Kind.OFFLOAD_W in copies else MemoryPart.FOR_W]
        return self.reload[stage][MemoryPart.FOR_B if kind is Kind.RELOAD_B else ACTIVATION]

    def costs_in_ticks(self, costs: Costs) -> Costs:
        """Return the times, with the lanes and links of other costs."""
        return Costs(
            self.seconds[Kind.F],
            self.seconds[Kind.B],
            self.seconds[Kind.W],
            communication=self.latencies,
            copy_lanes=costs.copy_lanes,
        )

    def may_need_copies(self, rank: int, num_microbatches: int) -> bool:
        """Whether a rank's limit keeps it from having all of a step at a time."""
        most = sum(self.sizes[stage][sum(MemoryPart)] for stage in stages_on(self.placement, rank))
        return self.limit is not None and most * num_microbatches > self.limit


def _share(size: float, sizes: list[float]) -> float:
    activation = sizes[ACTIVATION]
    return size / activation if activation else 1.0


def _tick(seconds: list[float]) -> float:
    """Return the tick, in seconds, of which these are multiples as nearly as may be."""
    mean = sum(seconds) / len(seconds)
    if not mean:
        return 1.0
    # Those of the longest forward come first: times that people write down are whole in these.
    ticks = [base / n for base in (*seconds[:1], mean) for n in range(_FEWEST_TICKS, _MOST_TICKS)]
    fitting = [tick for tick in ticks if tick and _FEWEST_TICKS <= mean / tick <= _MOST_TICKS]

    def error(tick: float) -> float:
        return round(max(abs(second / tick - round(second / tick)) for second in seconds), 6)

    return min(fitting or [mean / _FEWEST_TICKS], key=error)


def _sizes_in_grains(
    sizes: list[list[float]], limit: float | None
) -> tuple[tuple[tuple[int, ...], ...], int | None]:
    """Return sizes and limit in grains: exactly where all are whole numbers."""
    if limit is None:
        return tuple((0,) * len(of_stage) for of_stage in sizes), None
    numbers = [number for of_stage in sizes for number in of_stage]
    if all(float(number).is_integer() for number in numbers) and limit < _MOST_GRAINS**2:
        grain = float(gcd(*map(int, numbers)) or 1)
    else:
        grain = limit / _MOST_GRAINS or 1.0
    # A sum may come out too small by a hair, so that a plan is checked again by its real costs.
    whole = (tuple(floor(size / grain + _ROUNDING) for size in of_stage) for of_stage in sizes)
    return tuple(whole), floor(limit / grain + _ROUNDING)


_STEPS_TO_SETTLE = 8


@dataclass(frozen=True)
class StartTimes:
    """When a plan does what, in ticks.

    Attributes:
        begins: When each F, B and W starts, and when each copy back takes its memory.
        copies: When each copy starts.
        kinds: The kinds of copies of each stage and microbatch.
        ends: When each rank's last action ends.
    """

    begins: dict[Action, int]
    copies: dict[Action, int]
    kinds: dict[tuple[int, int], frozenset[Kind]]
    ends: tuple[int, ...]

    @property
    def makespan(self) -> int:
        """When the last action ends."""
        return max(self.ends)

    @classmethod
    def of(
        cls, plan: Schedule, costs: Costs, whole: IntegerCosts, has_barrier: bool = True
    ) -> StartTimes:
        """Simulate a plan whose B and W are apart, before it is lowered, with costs in ticks.

        Without a barrier it is a step among many, in the steady state.
        """
        copied: defaultdict[tuple[int, int], set[Kind]] = defaultdict(set)
        for rank in plan:
            for action in rank:
                copied[action[1:]] |= {action.kind} & COPIES
        kinds = {place: frozenset(of_place) for place, of_place in copied.items()}
        ticks = {
            Action(kind, *place): float(whole.copy(Action(kind, *place), of_place))
            for place, of_place in kinds.items()
            for kind in of_place
            if KINDS[kind].lane
        }
        for_w = {
            action: seconds - whole.reload[action.stage][MemoryPart.FOR_B]
            for action, seconds in ticks.items()
            if action.kind is Kind.RELOAD
        }
        simulation = Simulation(plan, whole.costs_in_ticks(costs), (ticks, for_w))
        ends = [0.0] * plan.num_ranks
        for _ in range(1 if has_barrier else 1 + _STEPS_TO_SETTLE):
            first = min(ends)
            step_events, ends = simulation.run([end - first for end in ends])
        events = list(step_events)
        begins = {e.action: round(e.start) for e in events if e.lane == COMPUTE_LANE}
        copies = {e.action: round(e.start) for e in events if e.lane != COMPUTE_LANE}
        return cls(begins, copies, kinds, tuple(map(round, ends)))
