"""Zero-bubble schedules for any memory limit and any times: ``zb_1p``, ``zb_2p`` and ``zb``.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 3.1: fill the wait for the
first B with as many F as memory and time allow, then one F and one B in turn, and W in the gaps.
Here the first is a depth for every rank, searched for, and the rest is ``fill_gaps``.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..actions import Kind
from ..costs import Costs
from ..schedule import Schedule, loop_placement
from ..search.list_schedule import ScheduleSearch
from ..search.order_rules import AlternatingOrder
from ..search.problem import SchedulingProblem

# Shares of an F that a rank may idle before its first B instead of delaying it by one more F.
# Rounding down leaves a small wait on every rank; rounding up accumulates from rank to rank.
IDLE_SHARES = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
MOST_ACTIONS = 1_000_000


def zb_memory_multiple(
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int,
    *,
    multiple: int,
    costs: Costs | None = None,
) -> Schedule:
    """The shortest schedule in a multiple of the memory of 1F1B (ZB-1p, ZB-2p).

    The memory of 1F1B is p activations of the first stage. ZB-1p is ZB-H1 for equal times. ZB-2p
    has almost no bubble, for an optimizer without barrier: ranks end one after the other, as they
    began.

    ``draw(build("zb_2p", 3, 5))``::

        rank 0 F0 F1 F2 F3 F4 B0 W0 B1 W1 B2 W2 B3 W3 B4 W4 ......
        rank 1 ...F0 F1 F2 B0 F3 B1 F4 B2 W0 B3 W1 B4 W2 W3 W4 ...
        rank 2 ......F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 W1 W2 W3 W4

    If the residue is larger than the activation, it counts instead. If a later stage needs more for
    a single microbatch, that is the limit.

    Args:
        multiple: 1 for ZB-1p, 2 for ZB-2p.
    """
    problem = SchedulingProblem(
        loop_placement(num_ranks, 1), num_microbatches, costs or Costs.unit()
    )
    names = ("activation", "weight_residue")
    held = max(problem.costs.per_stage(name, num_ranks)[0] for name in names)
    limit = max(multiple * num_ranks * held, problem.smallest_limit)
    return _shortest(problem.limited_to(limit, f"zb_{multiple}p"))


def zb(
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int,
    *,
    costs: Costs | None = None,
    memory_limit: float | None = None,
) -> Schedule:
    """The shortest schedule under a memory limit, for the times of each stage.

    The length is the longest span of a rank from its first F to its last W, for an optimizer
    without barrier. At most 24 candidates are timed, most of them only until they are longer than
    the best so far; each takes time proportional to p * m, and the search at most 10 s.

    Args:
        memory_limit: The most memory of a rank, in the unit of ``costs``; None: that of ``zb_2p``,
            above which more memory hardly helps.

    Raises:
        ScheduleError: The limit is too small for a single microbatch.
    """
    if memory_limit is None:
        return zb_memory_multiple(num_ranks, num_microbatches, num_chunks, multiple=2, costs=costs)
    problem = SchedulingProblem(
        loop_placement(num_ranks, 1), num_microbatches, costs or Costs.unit()
    )
    return _shortest(problem.limited_to(memory_limit, "zb"))


def _shortest(problem: SchedulingProblem) -> Schedule:
    search = ScheduleSearch(problem, num_actions=MOST_ACTIONS)
    for depths in dict.fromkeys(_candidate_depths(problem)):
        for patience in (0.0, None):
            search.consider(AlternatingOrder(problem, depths), patience)
    return search.shortest()


def _candidate_depths(problem: SchedulingProblem) -> Iterator[tuple[int, ...]]:
    most = [problem.most_activations(rank) for rank in range(problem.num_ranks)]
    # A rank that holds fewer microbatches than the one before it never waits for the other's
    # memory; where memory is scarce the same number can still be better.
    falling = list(most)
    level = list(most)
    for rank in range(1, problem.num_ranks):
        falling[rank] = max(1, min(most[rank], falling[rank - 1] - 1))
        level[rank] = min(most[rank], level[rank - 1])
    for limits in (falling, level):
        for share in IDLE_SHARES:
            yield _depths(problem, limits, share)


def _depths(problem: SchedulingProblem, limits: list[int], idle_share: float) -> tuple[int, ...]:
    """Return how many F fit before the first B of every rank, from the last rank to the first.

    Args:
        limits: The most F without B of every rank.
        idle_share: The share of an F that a rank may rather idle than run one more F.
    """
    of_kind = problem.costs.seconds_by_kind(problem.num_stages)
    latencies = problem.costs.latencies(problem.placement)
    depths = [1] * problem.num_ranks
    wait = 0.0
    for rank in reversed(range(problem.num_ranks - 1)):
        seconds = of_kind[Kind.F][rank]
        # From the end of the first F to the first B: to the next rank and back, and its own wait.
        there_and_back = of_kind[Kind.F][rank + 1] + of_kind[Kind.B][rank + 1]
        wait += there_and_back + 2 * latencies[rank]
        fitting = _num_forwards_in(wait, seconds, idle_share) if seconds else limits[rank]
        depths[rank] = min(limits[rank], max(fitting, depths[rank + 1]) + 1)
        # With more F than fit, the first B waits for the last of them.
        wait = max(wait, (depths[rank] - 1) * seconds)
    return tuple(depths)


def _num_forwards_in(wait: float, seconds: float, idle_share: float) -> int:
    # A quotient of sums may be off by its last digits.
    number = int(wait / seconds + 1e-9)
    return number + (wait / seconds - number > idle_share + 1e-9)
