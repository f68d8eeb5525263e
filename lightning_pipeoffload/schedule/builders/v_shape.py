"""V-shaped schedules as building blocks: V-Min, V-Half, 1F1B-V, and V for any memory limit.

The stages go down the ranks and back up, so that a rank holds one stage whose activations live long
and one whose activations live short, and all ranks need about the same memory. A block is a row of
numbers, the slots from each step of a microbatch to the next one. Source: Qi et al., "Pipeline
Parallelism with Controllable Memory", NeurIPS 2024, section 3.3, appendix, and the authors' code.

For V the best block is searched, among others than in the paper's appendix A: with an odd number of
slots between two ranks on the way down and one on the way up, the first chunk's F and the second
one's B are always in slots of one parity and the other two in those of the other, so they never
collide, on any number of ranks. And the first chunk's B may come later than it must, which no pair
of hops makes up for where the memory is little less than that of 1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import ceil
from typing import NamedTuple

from ..actions import MemoryLimitError
from ..costs import Costs
from ..schedule import Schedule, v_placement
from ..search.building_block import (
    INTERVAL,
    BuildingBlock,
    SearchSetting,
    best_schedule,
    simpler_times,
    slots_from_hops,
    v_block,
)

HOPS = ((5, 5), (5, 3), (5, 1), (3, 3), (3, 1), (1, 1))
"""Slots between two ranks on the way down: on the first ranks, and on those after."""


class WaveShape(NamedTuple):
    """How fast a microbatch goes down the ranks and back up.

    Attributes:
        near: Slots between two ranks on the way down, on the first ranks.
        far: The same on those after.
        wait_between: Slots that B of the first chunk waits where the two meet, on its way up.
        wait_at_turn: Slots that B of the first chunk waits on the last rank, before it goes up.
    """

    near: int
    far: int
    wait_between: int = 0
    wait_at_turn: int = 0


SHAPES = (
    *(WaveShape(*hops) for hops in HOPS),
    *(WaveShape(*hops, wait_at_turn=INTERVAL) for hops in HOPS),
    WaveShape(3, 5, wait_between=2),
)
"""The rows of numbers to search, plain ones first.

What B waits is paid in memory, and the same memory then has shorter hops: once the first rank has
no more F of its first chunk, the last one of the second comes back sooner.
"""

FIRST_RANK = (
    (3, 4, 1),
    (3, 4, 5),
    (1, 2, 5),
    (5, 4, 1),
    (1, 2, 3),
    (1, 4, 3),
    (1, 4, 5),
    (3, 2, 1),
    (3, 2, 5),
    (5, 2, 1),
    (5, 2, 3),
    (5, 4, 3),
)
"""Slots on the first rank after the first chunk's F, modulo 6: the second's F and B, its own B.

The most useful first, for on many ranks not all can be tried."""


def v(
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int,
    *,
    costs: Costs | None = None,
    memory_limit: float | None = None,
) -> Schedule:
    """The fastest V-shaped schedule that is found for these times within a memory limit.

    With equal times and no communication the longest rank takes ``6 * (m + p) - 1 - 3 * k`` slots
    at least, for ``k`` activations. What is found is within one slot of that for 2 to 16 ranks and
    ``k`` from ``p`` to ``2 * p``, and not for every ``k`` on more (17 ranks: two slots for 30). It
    is more for ``p`` activations on 2, 3 and 5 ranks, which is less than V-Min holds there: no
    block repeats every six slots in that memory (shown by trying all of them), so the bubble grows
    with every microbatch. The search takes a few seconds, on many ranks as well: see
    ``best_schedule``.

    Args:
        costs: The costs of the stages; None: equal times, and an activation of 1.
        memory_limit: The most memory of a rank, in the unit of the costs; None: as much as
            ``2 * num_ranks`` activations, as 1F1B.

    Raises:
        ScheduleError: The limit is less than two activations.
    """
    costs = costs or Costs.unit()
    setting = _setting(num_ranks, costs, memory_limit)
    return best_schedule(fitting_blocks(setting), setting, num_microbatches)


def _setting(num_ranks: int, costs: Costs, memory_limit: float | None) -> SearchSetting:
    """Return where the schedule runs, with the memory in the largest activations of a stage."""
    num_stages = 2 * num_ranks
    residue = max(costs.per_stage("weight_residue", num_stages))
    activation = max(residue, *costs.per_stage("activation", num_stages))
    if memory_limit is None or not activation:
        return SearchSetting(v_placement(num_ranks), costs, memory=num_stages)
    if memory_limit < 2 * activation:
        sentence = (
            "{limit} must be at least {needed} for v, the activations of both stages of a rank; "
            "raise it to that"
        )
        raise MemoryLimitError(sentence, memory_limit, 2 * activation)
    memory = memory_limit / activation
    return SearchSetting(v_placement(num_ranks), costs, memory, residue / activation)


def fitting_blocks(setting: SearchSetting) -> list[BuildingBlock]:
    """Return the blocks that use the memory best, with longer intervals where it is too small.

    Args:
        setting: Where the schedule runs, on a V; at least two activations fit.
    """
    # A microbatch is alive on a rank for as long as it goes from there to the loss and back, W
    # included: both stages of any rank take this many slots together, or more.
    alive = 2 * len(setting.placement) + 4
    interval = max(INTERVAL, ceil(alive / setting.memory))
    while True:
        peaks = {
            b: b.peak(setting.placement) for b in _blocks(len(setting.placement) // 2, interval)
        }
        fitting = {b: peak for b, peak in peaks.items() if peak <= setting.memory}
        if fitting:
            highest = max(fitting.values())
            return [b for p in (highest, highest - 1) for b in fitting if fitting[b] == p]
        interval += 1 + interval // 8


def _blocks(num_ranks: int, interval: int) -> Iterator[BuildingBlock]:
    for first_rank, shape in product(FIRST_RANK, SHAPES):
        f, _, last_b = first_rank
        if (last_b - shape.wait_between - f) % INTERVAL:
            for num_near in range(num_ranks - 1 if shape.near != shape.far else 1):
                yield _block(shape, num_near, num_ranks, first_rank, interval)


def _block(
    shape: WaveShape, num_near: int, num_ranks: int, first_rank: tuple[int, ...], interval: int
) -> BuildingBlock:
    """Return the block of a shape with the smallest turns that give these slots on its first rank.

    After the first ``num_near`` hops they are those of the far ranks.
    """
    num_far = num_ranks - 1 - num_near
    down = [shape.near] * num_near + [shape.far] * num_far
    last_up = [1] * (num_ranks - 1)
    if num_near:
        last_up[num_far] += shape.wait_between
    f, b, last_b = first_rank
    f_to_f = _slots_modulo_interval(f - sum(down) - len(down))
    b_to_b = _slots_modulo_interval(last_b - b - sum(down) - sum(last_up)) + shape.wait_at_turn
    return v_block(down, (f_to_f, _slots_modulo_interval(b - f), b_to_b), interval, last_up)


def _slots_modulo_interval(slots: int) -> int:
    return 1 + (slots - 1) % INTERVAL


def v_min(
    num_ranks: int, num_microbatches: int, num_chunks: int, *, costs: Costs | None = None
) -> Schedule:
    """The least memory that needs no bubble between microbatches, for equal times (V-Min).

    Every rank keeps about a third of the activations of 1F1B.

    ``draw(build("v_min", 3, 2))``::

        rank 0 0F0 0F1 ............5F0 5B0 5F1 5B1 5W0 5W1 0B0 0W0 0B1 0W1 ....
        rank 1 ....1F0 1F1 ....4F0 ....4F1 4B0 4W0 4B1 1B0 4W1 1B1 1W0 1W1 ....
        rank 2 ........2F0 3F0 2F1 3F1 ........3B0 2B0 3B1 2B1 3W0 2W0 3W1 2W1

    Args:
        costs: The costs of the stages, to search for a better block in the same memory where the
            times differ; None: equal times, and the paper's block.
    """
    f_to_b = 3 if num_ranks % 3 == 0 else 1
    block = v_block([1] * (num_ranks - 1), turns=(1, f_to_b, 1))
    return _from_block(block, num_ranks, num_microbatches, costs, 2 * ((num_ranks + 4) // 3))


def v_half(
    num_ranks: int, num_microbatches: int, num_chunks: int, *, costs: Costs | None = None
) -> Schedule:
    """Half of the memory of 1F1B, and half of its bubble (V-Half).

    ``draw(build("v_half", 2, 3))``::

        rank 0 0F0 0F1 0F2 3F0 3B0 3W0 3F1 0B0 3B1 0W0 3W1 3F2 3B2 0B1 3W2 0B2 0W1 0W2 ....
        rank 1 ....1F0 2F0 1F1 2F1 2B0 1B0 2W0 1F2 1W0 2F2 2B1 1B1 2B2 1B2 2W1 1W1 2W2 1W2

    Args:
        costs: The costs of the stages, to search for a better block in the same memory where the
            times differ; None: equal times, and the paper's block.
    """
    f_to_b = 4 if num_ranks % 2 == 0 else 1
    block = v_block([2] * (num_ranks - 1), turns=(1, f_to_b, 2))
    return _from_block(block, num_ranks, num_microbatches, costs)


def one_f_one_b_v(
    num_ranks: int, num_microbatches: int, num_chunks: int, *, costs: Costs | None = None
) -> Schedule:
    """B and W in one piece, in two thirds of the memory of 1F1B and less bubble (1F1B-V).

    ``draw(build("1f1b_v", 2, 2))``::

        rank 0 0F0 0F1 ....3F0 3BW0    3F1 3BW1    ....0BW0    ........0BW1
        rank 1 ....1F0 2F0 1F1 2F1 ....2BW0    1BW0    2BW1    1BW1    ........

    Args:
        costs: The costs of the stages, to choose the order of warm-up and cool-down; None: equal.
    """
    f_to_b = 5 if num_ranks % 3 == 0 else 2
    forwards = (1,) * (2 * num_ranks - 1)
    # BW takes two slots. Three more after every third BW keep it off the slots of the forwards.
    first = (3 - (num_ranks + 2) % 3) % 3
    backwards = (5 if (first + nth) % 3 == 0 else 2 for nth in range(1, 2 * num_ranks))
    block = BuildingBlock(slots_from_hops((*forwards, f_to_b, *backwards)), INTERVAL)
    return _from_block(block, num_ranks, num_microbatches, costs, is_fused=True)


def _from_block(
    block: BuildingBlock,
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | None,
    memory: int = 0,
    is_fused: bool = False,
) -> Schedule:
    placement = v_placement(num_ranks)
    memory = max(memory, block.peak(placement))
    setting = SearchSetting(placement, costs or Costs.unit(), memory, is_fused=is_fused)
    has_simpler_times = len(simpler_times(setting.costs)) > 1
    others = fitting_blocks(setting) if has_simpler_times and not is_fused else []
    return best_schedule([block, *others], setting, num_microbatches)
