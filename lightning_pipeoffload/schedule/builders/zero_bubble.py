"""The hand-made zero-bubble schedules: B and W are apart, and W fills what would be idle.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.
"""

from __future__ import annotations

from ..actions import Action, Kind
from ..schedule import Schedule
from .classic import one_forward_one_backward

__all__ = ["late_weight_gradients", "zb_h1", "zb_h2"]


def zb_h1(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """A third of 1F1B's bubble in the memory of 1F1B (ZB-H1).

    The bubble is (p - 1)(F + B - W) seconds; the first rank keeps p activations.

    ``draw(build("zb_h1", 3, 4))``::

        rank 0 F0 F1 F2 ......B0 W0 F3 B1 W1 B2 W2 B3 W3
        rank 1 ...F0 F1 ...B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        rank 2 ......F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
    """
    return late_weight_gradients(num_ranks, num_microbatches, depth=1)


def zb_h2(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """No bubble for equal times and an optimizer without barrier, in twice the memory (ZB-H2).

    The longest rank takes (p - 1)(F + B - 2W) seconds more than its work; the first rank keeps
    2p - 1 activations. The ranks end one after the other, as they began.

    ``draw(build("zb_h2", 3, 5))``::

        rank 0 F0 F1 F2 F3 F4 B0 W0 B1 W1 B2 W2 B3 W3 B4 W4 ......
        rank 1 ...F0 F1 F2 B0 F3 B1 F4 B2 W0 B3 W1 B4 W2 W3 W4 ...
        rank 2 ......F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 W1 W2 W3 W4
    """
    return late_weight_gradients(num_ranks, num_microbatches, depth=2)


def late_weight_gradients(
    num_ranks: int, num_microbatches: int, depth: int, sooner: int = 0
) -> Schedule:
    """Warm up with ``depth`` forwards per later rank, and run W ``depth`` late per earlier rank.

    Forwards in flight without their W are then equally many on all ranks. The W that are late at
    the end, all of them where microbatches are few, come last.

    Args:
        num_ranks: Ranks of the pipeline.
        num_microbatches: Microbatches of one step.
        depth: 1 for ZB-H1, 2 for ZB-H2.
        sooner: By how many B each W runs sooner than that, which takes less memory and more time.
    """

    def order(stage: int) -> list[Action]:
        forwards = [Action(Kind.F, stage, m) for m in range(num_microbatches)]
        weights = [Action(Kind.W, stage, m) for m in range(num_microbatches)]
        # The k-th W follows the (k + delay)-th B.
        delay = min(max(0, depth * stage - sooner), num_microbatches)
        backwards = [[Action(Kind.B, stage, m)] for m in range(num_microbatches)]
        for backward, weight in zip(backwards[delay:], weights, strict=False):
            backward.append(weight)
        num_warm_up = depth * (num_ranks - 1 - stage)
        late = weights[num_microbatches - delay :]
        return one_forward_one_backward(forwards, backwards, num_warm_up) + late

    return Schedule.of(order(stage) for stage in range(num_ranks))
