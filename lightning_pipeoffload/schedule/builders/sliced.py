"""Schedules of sequences in slices: 1F1B, ZB-H1 and a V whose units are slices of microbatches.

A unit is a slice of a microbatch. Units run forward in order; backward they run by microbatch, each
microbatch's slices in reverse, for a slice's keys and values get gradients from all later ones. So
the last stage begins a microbatch's backward when it has all of its slices, and every rank has as
many more forwards in its warm-up as there are slices but one. On a V, and under a limit, a search
puts F, B and W where they fit (see ``AlternatingSlices``).

Source: Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language Model
Training", 2024, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import inf

from ..actions import Action, Kind
from ..costs import Costs
from ..schedule import Schedule, loop_placement, v_placement
from ..search.list_schedule import ScheduleSearch
from ..search.order_rules import AlternatingSlices
from ..search.problem import ROUNDING, SchedulingProblem
from ..simulation.memory import peak_memory
from .classic import delayed_weight_gradients, one_f_one_b_by_warm_ups

# The search varies the share that a rank holds of what the limit allows beyond one microbatch, and,
# in shares of an F, how long it waits through short gaps, and to start a B in time.
SHARES = (0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)
PATIENCE = (0.0, 0.5)
PUNCTUALITY = (0.0, 0.5)
MOST_ACTIONS = 600_000


def seq_1f1b(
    num_ranks: int, num_microbatches: int, num_chunks: int, *, num_sequence_slices: int = 1
) -> Schedule:
    """1F1B with slices as its units (Seq1F1B); with one slice it is 1F1B.

    The bubble is p - 1 times F, B and W of a slice, and that of a microbatch's slices that wait for
    the last one; rank i keeps p - i + s - 1 activations of a slice.

    ``draw(build("seq_1f1b", 2, 2, num_sequence_slices=2))``::

        rank 0 F0 F1 F2 ......BW1   F3 BW0   ...BW3   BW2
        rank 1 ...F0 F1 BW1   F2 BW0   F3 BW3   BW2   ......

    Args:
        num_sequence_slices: Slices of each sequence.
    """
    num_units = num_microbatches * num_sequence_slices
    units = one_f_one_b_by_warm_ups(num_units, _warm_ups(num_ranks, num_sequence_slices))
    return _reverse_backward_slices(units, num_sequence_slices)


def seq_zb(
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int,
    *,
    num_sequence_slices: int = 1,
    costs: Costs | None = None,
    memory_limit: float | None = None,
) -> Schedule:
    """ZB-H1 with slices as its units; with one slice it is ZB-H1.

    ``draw(build("seq_zb", 2, 2, num_sequence_slices=2))``::

        rank 0 F0 F1 F2 ...B1 W1 F3 B0 W0 B3 W3 B2 W2
        rank 1 ...F0 F1 B1 F2 B0 W1 F3 B3 W0 B2 W3 W2

    Args:
        num_sequence_slices: Slices of each sequence.
        costs: The costs of the stages; None: equal times, and an activation of 1.
        memory_limit: The most memory of a rank, in the unit of ``costs``. Where that order needs
            more, the shortest that a search finds; None: any.

    Raises:
        MemoryLimitError: The limit is too small for a single microbatch.
    """
    costs, num_units = costs or Costs.unit(), num_microbatches * num_sequence_slices
    warm_ups = _warm_ups(num_ranks, num_sequence_slices)
    units = delayed_weight_gradients(num_units, warm_ups, range(num_ranks))
    schedule = _reverse_backward_slices(units, num_sequence_slices)
    limit = inf if memory_limit is None else memory_limit * (1 + ROUNDING)
    if num_sequence_slices == 1 or max(peak_memory(schedule, costs)) <= limit:
        return schedule
    sizes = loop_placement(num_ranks, 1), num_microbatches, costs, inf, num_sequence_slices
    return _shortest(SchedulingProblem(*sizes).limited_to(limit, "seq_zb"))


def seq_v(
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int,
    *,
    num_sequence_slices: int = 1,
    costs: Costs | None = None,
    memory_limit: float | None = None,
) -> Schedule:
    """The shortest schedule of slices that a search finds on a V, whose last stage is on rank 0.

    The search times 28 candidates at most, each in time proportional to its actions.

    ``draw(build("seq_v", 2, 1, num_sequence_slices=2))``::

        rank 0 0F0 0F1 ....3F0 ....3F1 3B1 3B0 3W1 0B1 3W0 0B0 0W1 0W0 ....
        rank 1 ....1F0 2F0 1F1 2F1 ........2B1 1B1 2B0 1B0 2W1 1W1 2W0 1W0

    Args:
        num_sequence_slices: Slices of each sequence.
        costs: The costs of the stages; None: equal times, and an activation of 1.
        memory_limit: The most memory of a rank, in the unit of ``costs``; None: what p microbatches
            hold on a rank, which is the memory of 1F1B.

    Raises:
        MemoryLimitError: The limit is too small for a single microbatch.
    """
    sizes = v_placement(num_ranks), num_microbatches, costs or Costs.unit(), inf
    problem = SchedulingProblem(*sizes, num_sequence_slices)
    limit = num_ranks * problem.smallest_limit if memory_limit is None else memory_limit
    return _shortest(problem.limited_to(limit, "seq_v"))


def _shortest(problem: SchedulingProblem) -> Schedule:
    search = ScheduleSearch(problem, MOST_ACTIONS)
    forward = max(problem.operations.seconds[: problem.num_stages])
    of_one = [sum(problem.growth[stage] for stage in stages) for stages in problem.stages]
    limits = [problem.memory_limit - headroom for headroom in problem.headroom]
    # From few to many in flight: of equally short ones that with the least memory stays.
    for share, patience, punctuality in product(SHARES, PATIENCE, PUNCTUALITY):
        held = [
            one + share * max(0.0, min(limit, problem.num_microbatches * one) - one)
            for one, limit in zip(of_one, limits, strict=True)
        ]
        rule = AlternatingSlices(problem, held, punctuality * forward)
        search.consider(rule, patience * forward)
    return _reverse_backward_slices(search.shortest(), problem.num_slices)


def _warm_ups(num_ranks: int, num_slices: int) -> Sequence[int]:
    """Return the forwards of each rank before its first backward."""
    return [num_ranks - 1 - rank + num_slices - 1 for rank in range(num_ranks)]


def _reverse_backward_slices(units: Schedule, count: int) -> Schedule:
    """Rename B, W and BW so that each microbatch's slices run backward in reverse."""

    def renamed(action: Action) -> Action:
        if action.kind is Kind.F:
            return action
        first, place = divmod(action.microbatch, count)
        return action._replace(microbatch=first * count + count - 1 - place)

    return Schedule.of((map(renamed, rank) for rank in units), units.name, count)
