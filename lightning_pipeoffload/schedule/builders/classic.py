"""Hand-made schedules with a stage per rank, and interleaved 1F1B.

All of them are an order of forwards, an order of backwards and the length of the warm-up. Those
with B and W apart are from Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..actions import Action, Kind, ScheduleError
from ..schedule import Schedule, loop_placement, stages_on


def one_forward_one_backward(
    forwards: Sequence[Action], backwards: Sequence[Sequence[Action]], num_warm_up: int
) -> list[Action]:
    """Arrange one rank's actions: forwards alone, then one of each in turn, then backwards alone.

    Args:
        forwards: The forwards, in order.
        backwards: The actions of each backward, in order; as many as there are forwards.
        num_warm_up: How many forwards run before the first pair; more than there are means all.
    """
    paired = forwards[num_warm_up:]
    warm_up = list(forwards[:num_warm_up])
    steady = [
        a
        for forward, backward in zip(paired, backwards, strict=False)
        for a in (forward, *backward)
    ]
    cool_down = [a for backward in backwards[len(paired) :] for a in backward]
    return warm_up + steady + cool_down


def gpipe(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """All forwards, then all backwards (GPipe, Huang et al. 2019, section 2.3).

    The bubble is p - 1 times F, B and W; every rank keeps all m activations of its stage.

    ``draw(build("gpipe", 3, 3))``::

        rank 0 F0 F1 F2 ..................BW0   BW1   BW2
        rank 1 ...F0 F1 F2 .........BW0   BW1   BW2   ......
        rank 2 ......F0 F1 F2 BW0   BW1   BW2   ............
    """
    return one_f_one_b_by_warm_ups(num_microbatches, warm_ups=[num_microbatches] * num_ranks)


def one_f_one_b(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """One backward for each forward as soon as there is one (PipeDream-Flush, 1F1B).

    The bubble is that of GPipe, p - 1 times F, B and W; rank i keeps p - i activations. Source:
    Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021.

    ``draw(build("1f1b", 3, 3))``::

        rank 0 F0 F1 F2 ............BW0   ...BW1   ...BW2
        rank 1 ...F0 F1 ......BW0   F2 BW1   ...BW2   ......
        rank 2 ......F0 BW0   F1 BW1   F2 BW2   ............
    """
    return one_f_one_b_by_warm_ups(num_microbatches, warm_ups=range(num_ranks - 1, -1, -1))


def interleaved_1f1b(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """1F1B with several stages per rank, in Megatron's order (Narayanan et al. 2021, section 2.2).

    The bubble is p - 1 times F, B and W of one stage, which is a v-th of a rank; the first rank
    keeps p * v + p - 1 activations of a stage.

    ``draw(build("interleaved_1f1b", 2, 2))``::

        rank 0 0F0 0F1 2F0 2F1 ........2BW0    ....2BW1    0BW0    0BW1
        rank 1 ....1F0 1F1 3F0 3BW0    3F1 3BW1    1BW0    1BW1    ........

    Raises:
        ScheduleError: The microbatches do not fill groups of ``num_ranks``.
    """
    if num_microbatches % num_ranks:
        enough = -(-num_microbatches // num_ranks) * num_ranks
        raise ScheduleError(
            f"num_microbatches ({num_microbatches}) must be a multiple of num_ranks ({num_ranks}) "
            f"for interleaved_1f1b; use {enough}, or schedule=1f1b"
        )
    placement = loop_placement(num_ranks, num_chunks)

    def order(rank: int) -> list[Action]:
        stages = stages_on(placement, rank)
        forwards = _in_groups(Kind.F, stages, num_microbatches, num_ranks)
        backwards = _in_groups(Kind.BW, stages[::-1], num_microbatches, num_ranks)
        num_warm_up = 2 * (num_ranks - 1 - rank) + (num_chunks - 1) * num_ranks
        return one_forward_one_backward(forwards, [[b] for b in backwards], num_warm_up)

    return Schedule.of(order(rank) for rank in range(num_ranks))


def one_f_one_b_by_warm_ups(num_microbatches: int, warm_ups: Sequence[int]) -> Schedule:
    """Return each rank's forwards and BW's, after a warm-up of so many forwards."""

    def order(stage: int, num_warm_up: int) -> list[Action]:
        forwards = [Action(Kind.F, stage, m) for m in range(num_microbatches)]
        backwards = [[Action(Kind.BW, stage, m)] for m in range(num_microbatches)]
        return one_forward_one_backward(forwards, backwards, num_warm_up)

    return Schedule.of(order(stage, num_warm_up) for stage, num_warm_up in enumerate(warm_ups))


def _in_groups(
    kind: Kind, stages: Sequence[int], num_microbatches: int, group_size: int
) -> list[Action]:
    """Take a group of microbatches through every stage of the rank, then the next group."""
    return [
        Action(kind, stage, first + offset)
        for first in range(0, num_microbatches, group_size)
        for stage in stages
        for offset in range(group_size)
    ]


def late_weight_gradients(
    num_ranks: int, num_microbatches: int, num_chunks: int = 1, *, depth: int, sooner: int = 0
) -> Schedule:
    """B and W apart: ``depth`` forwards more in the warm-up for each later rank (ZB-H1, ZB-H2).

    W runs ``depth`` B's late for each earlier rank, so that all ranks have equally many forwards in
    flight without their W. The W that are late at the end come last.

    ZB-H1 has ``depth`` 1. The bubble is (p - 1)(F + B - W) seconds, a third of 1F1B's; the first
    rank keeps p activations, as under 1F1B.

    ``draw(build("zb_h1", 3, 4))``::

        rank 0 F0 F1 F2 ......B0 W0 F3 B1 W1 B2 W2 B3 W3
        rank 1 ...F0 F1 ...B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        rank 2 ......F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

    ZB-H2 has ``depth`` 2, and no bubble for equal times and an optimizer without barrier: the ranks
    end one after the other, as they began. The longest rank takes (p - 1)(F + B - 2W) seconds more
    than its work; the first rank keeps 2p - 1 activations.

    ``draw(build("zb_h2", 3, 5))``::

        rank 0 F0 F1 F2 F3 F4 B0 W0 B1 W1 B2 W2 B3 W3 B4 W4 ......
        rank 1 ...F0 F1 F2 B0 F3 B1 F4 B2 W0 B3 W1 B4 W2 W3 W4 ...
        rank 2 ......F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 W1 W2 W3 W4

    Args:
        depth: 1 for ZB-H1, 2 for ZB-H2.
        sooner: By how many B each W runs sooner than that, which takes less memory and more time.
    """
    stages = range(num_ranks)
    warm_ups = [depth * (num_ranks - 1 - stage) for stage in stages]
    return delayed_weight_gradients(
        num_microbatches, warm_ups, [depth * s - sooner for s in stages]
    )


def delayed_weight_gradients(
    num_microbatches: int, warm_ups: Sequence[int], delays: Sequence[int]
) -> Schedule:
    """Return each rank's forwards, B's and W's, a stage per rank.

    Args:
        num_microbatches: Microbatches of one step.
        warm_ups: The forwards of each rank before its first B.
        delays: By how many B's each rank's W's come later than their own; 0 at least.
    """

    def order(stage: int, num_warm_up: int, delay: int) -> list[Action]:
        forwards = [Action(Kind.F, stage, m) for m in range(num_microbatches)]
        weights = [Action(Kind.W, stage, m) for m in range(num_microbatches)]
        # The k-th W follows the (k + delay)-th B.
        delay = min(max(0, delay), num_microbatches)
        backwards = [[Action(Kind.B, stage, m)] for m in range(num_microbatches)]
        for backward, weight in zip(backwards[delay:], weights, strict=False):
            backward.append(weight)
        late = weights[num_microbatches - delay :]
        return one_forward_one_backward(forwards, backwards, num_warm_up) + late

    stages = zip(warm_ups, delays, strict=True)
    return Schedule.of(order(stage, *numbers) for stage, numbers in enumerate(stages))
