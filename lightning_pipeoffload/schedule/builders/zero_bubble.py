"""The hand-made zero-bubble schedules: B and W are apart, and W fills what would be idle.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.
"""

from __future__ import annotations

from ..actions import Action, Kind
from ..schedule import Schedule
from .classic import one_forward_one_backward

__all__ = ["zb_h1", "zb_h2"]


def zb_h1(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """A third of 1F1B's bubble in the memory of 1F1B (ZB-H1)."""
    return _with_late_weight_gradients(num_ranks, num_microbatches, depth=1)


def zb_h2(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """No bubble for equal times and an optimizer without barrier, in twice the memory (ZB-H2)."""
    return _with_late_weight_gradients(num_ranks, num_microbatches, depth=2)


def _with_late_weight_gradients(num_ranks: int, num_microbatches: int, depth: int) -> Schedule:
    """Warm up with ``depth`` forwards per later rank, and run W ``depth`` late per earlier rank.

    Forwards in flight without their W are then equally many on all ranks. The W that are late at
    the end, all of them where microbatches are few, come last.
    """

    def order(stage: int) -> list[Action]:
        forwards = [Action(Kind.F, stage, m) for m in range(num_microbatches)]
        weights = [Action(Kind.W, stage, m) for m in range(num_microbatches)]
        delay = min(depth * stage, num_microbatches)
        backwards = [[Action(Kind.B, stage, m)] for m in range(num_microbatches)]
        for backward, weight in zip(backwards[delay:], weights, strict=False):
            backward.append(weight)
        num_warm_up = depth * (num_ranks - 1 - stage)
        late = weights[num_microbatches - delay :]
        return one_forward_one_backward(forwards, backwards, num_warm_up) + late

    return Schedule.of(order(stage) for stage in range(num_ranks))
