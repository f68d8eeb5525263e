"""ZB-V: two stages per rank in a V, no bubble at equal times, and the same memory on every rank.

A schedule that is found for a few microbatches per rank serves any larger number: warm-up and
cool-down stay, and so does the bubble that they leave; the steady middle is repeated.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 6.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from ..actions import Action, Kind
from ..costs import Costs
from ..schedule import Schedule, v_placement
from ..search.list_schedule import ScheduleSearch
from ..search.order_rules import AlternatingOrder, FixedOrder
from ..search.problem import ROUNDING, SchedulingProblem
from ..simulation.simulate import simulate

# Microbatches that one round of the steady middle may hold; it is that of a few ranks together.
ROUNDS = (1, 2, 4)


def lengthen(schedule: Schedule, num_microbatches: int) -> Schedule | None:
    """Repeat a round of the steady middle on every rank, up to ``num_microbatches``.

    If the middle is not steady, the result may be invalid, with a deadlock. Takes time proportional
    to its number of actions.

    Args:
        schedule: A schedule of compute actions, without copies; each stage takes its microbatches
            in order.
        num_microbatches: At least those of ``schedule``.

    Returns:
        The longer schedule; None where the middle of some rank has no round.
    """
    extra = num_microbatches - schedule.num_microbatches
    ranks = []
    for actions in schedule:
        order = [(action.kind, action.stage) for action in actions]
        longer = _repeat_round(order, extra)
        if longer is None:
            return None
        ranks.append(_numbered_actions(longer))
    return Schedule.of(ranks)


def _repeat_round(order: list[tuple[Kind, int]], extra: int) -> list[tuple[Kind, int]] | None:
    """Insert ``extra`` microbatches next to the middle, in the order of the round found there."""
    actions = set(order)
    for size in (size for size in ROUNDS if extra % size == 0):
        length = size * len(actions)
        start = _round_near(order, len(order) // 2 - length // 2, length)
        if start is not None:
            middle = order[start : start + length]
            return order[:start] + middle * (extra // size) + order[start:]
    return None


def _round_near(order: Sequence[tuple[Kind, int]], middle: int, length: int) -> int | None:
    """Return the start, near ``middle``, of ``length`` actions with each action equally often."""
    num_actions = len(set(order))
    # No farther, as the warm-up and the cool-down are at the ends.
    for distance in range(len(order) // 4):
        for start in (middle - distance, middle + distance):
            counts = Counter(order[start : start + length])
            if len(counts) == num_actions and len(set(counts.values())) == 1:
                return start
    return None


def _numbered_actions(order: Sequence[tuple[Kind, int]]) -> list[Action]:
    seen: Counter[tuple[Kind, int]] = Counter()
    actions = []
    for kind, stage in order:
        actions.append(Action(kind, stage, seen[kind, stage]))
        seen[kind, stage] += 1
    return actions


# The search varies: activations that a rank holds less than it could, and, in shares of an F,
# how long a rank waits through short gaps, and how long to start a B in time.
SPARED = (0, 2)
PATIENCE = (0.0, 0.1, 0.3, 0.5, 0.7, 1.0, 2.0)
PUNCTUALITY = (0.0, 0.5)
MOST_ACTIONS = 600_000
# The search uses this many microbatches per rank; for many more, it repeats the result.
ENOUGH, MANY = 3, 4


def zb_v(
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int,
    *,
    costs: Costs | None = None,
    memory_limit: float | None = None,
    num_actions: int = MOST_ACTIONS,
) -> Schedule:
    """The hand-made order; with costs or a limit the shortest schedule that a search finds.

    ``draw(build("zb_v", 2, 3))``::

        rank 0 0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 3F2 3B2 0B1 3W2 0B2 0W1 0W2 ....
        rank 1 ....1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 1B1 2B2 1B2 2W1 1W1 2W2 1W2

    Rank r holds stages r and 2p - 1 - r, so the loss is where the input is. Times are equal or
    taken from ``costs``; W goes where there is room for it. "Shortest" is by the rank with the
    longest span from its first F to its last W, which counts on an optimizer without barrier. The
    search times 31 candidates and rearranges the best of them up to a fixed amount of work, a few
    seconds, at most; each candidate takes time proportional to p * m, but is given up when it is
    longer than the best so far. Where m is large, fewer are searched for and the steady middle is
    repeated.

    Args:
        memory_limit: The most memory of a rank, in the unit of ``costs``; None: what p microbatches
            hold on a rank, which is the memory of 1F1B.
        num_actions: The amount of work at which the search ends, in actions of its candidates.

    Raises:
        ScheduleError: The limit is too small for a single microbatch.
    """
    problem = SchedulingProblem(v_placement(num_ranks), num_microbatches, costs or Costs.unit())
    default = num_ranks * problem.smallest_limit
    problem = problem.limited_to(default if memory_limit is None else memory_limit, "zb_v")
    if costs is None and memory_limit is None:
        return _search_from_hand_made(problem, num_actions).shortest()
    return _search_and_lengthen(problem, num_actions) or _search_shortest(problem, num_actions)


def _search_from_hand_made(problem: SchedulingProblem, num_actions: int) -> ScheduleSearch:
    search = ScheduleSearch(problem, num_actions)
    order = hand_made_order(problem.num_ranks, problem.num_microbatches)
    search.consider(FixedOrder(problem, order), patience=0.0)
    return search


def _search_and_lengthen(problem: SchedulingProblem, num_actions: int) -> Schedule | None:
    """Search with few microbatches and repeat the middle; None where that adds to the bubble."""
    if problem.num_microbatches <= MANY * problem.num_ranks:
        return None
    few = replace(problem, num_microbatches=ENOUGH * problem.num_ranks)
    of_few = _search_shortest(few, num_actions)
    longer = lengthen(of_few, problem.num_microbatches)
    if longer is None:
        return None
    before, after = (simulate(schedule, problem.costs) for schedule in (of_few, longer))
    fits = max(after.peak_memory) <= problem.memory_limit * (1 + ROUNDING)
    added_work = max(problem.work) - max(few.work)
    is_as_good = max(after.span) <= (max(before.span) + added_work) * (1 + ROUNDING)
    return longer if fits and is_as_good else None


def _search_shortest(problem: SchedulingProblem, num_actions: int) -> Schedule:
    search = _search_from_hand_made(problem, num_actions)
    _consider_orders(problem, search)
    order = hand_made_order(problem.num_ranks, problem.num_microbatches)
    for is_patient_before_b in (False, True):
        unchanged = FixedOrder(problem, order, overtaking=False)
        search.consider_rounds(unchanged, is_patient_before_b)
    return search.shortest()


def _consider_orders(problem: SchedulingProblem, search: ScheduleSearch) -> None:
    """Consider as much in flight as memory allows, then rearrange the best again and again."""
    forward = max(problem.operations.seconds[: problem.num_stages])
    most = [problem.most_activations(rank) for rank in range(problem.num_ranks)]
    for spared, patience, punctuality in product(SPARED, PATIENCE, PUNCTUALITY):
        depths = [max(2, number - spared) for number in most]
        order = AlternatingOrder(problem, depths, punctuality * forward)
        search.consider(order, patience * forward)
    previous = None
    # Ends at the latest when the work that the search may do is used up.
    while search.best and search.best != previous:
        previous = search.best
        for patience, overtaking in product(PATIENCE, (False, True)):
            order_again = FixedOrder.of(problem, previous, overtaking)
            search.consider(order_again, patience * forward)


def hand_made_order(num_ranks: int, num_microbatches: int) -> list[list[int]]:
    """Return the order of F and B on every rank, as operations.

    The order needs at least 2p - 1 microbatches; for fewer, surplus actions are dropped.
    """
    written_for = max(num_microbatches, 2 * num_ranks - 1)
    return [
        list(_at_most_of_each(_rank_order(num_ranks, rank, written_for), num_microbatches))
        for rank in range(num_ranks)
    ]


def _rank_order(num_ranks: int, rank: int, num_microbatches: int) -> Iterator[int]:
    """Yield the phases of one rank; the last ones have more than there is."""
    # The stages go down the ranks and up again, and the gradients come back the same way.
    up = 2 * num_ranks - 1 - rank
    f0, f1, b1, b0 = rank, up, 2 * num_ranks + rank, 2 * num_ranks + up
    # Warm-up: the first chunk alone until the first microbatch is back, then both in turn.
    yield from [f0] * (2 * (num_ranks - rank) - 1)
    yield from [f1, f0] * rank
    # The second chunk has its loss; the first gradient is on its way back down the ranks.
    yield from [f1, b1] * (num_ranks - rank)
    # Steady: both chunks in turn.
    yield from [f0, b0, f1, b1] * (num_microbatches - num_ranks)
    # Cool-down.
    yield from [b0, b1] * rank
    yield from [b0] * (num_ranks - rank)


def _at_most_of_each(order: Iterator[int], number: int) -> Iterator[int]:
    seen: Counter[int] = Counter()
    for operation in order:
        seen[operation] += 1
        if seen[operation] <= number:
            yield operation
