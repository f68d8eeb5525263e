"""V-shaped schedules as building blocks: V-Min, V-Half and 1F1B-V.

The stages go down the ranks and back up, so that a rank holds one stage whose activations live long
and one whose activations live short, and all ranks need about the same memory. A block is a row of
numbers, the slots from each step of a microbatch to the next one. Source: Qi et al., "Pipeline
Parallelism with Controllable Memory", NeurIPS 2024, section 3.3, appendix, and the authors' code.
"""

from __future__ import annotations

from ..costs import Costs
from ..placement import v
from ..schedule import Schedule
from ..search.block_search import SearchSetting, best_schedule, simpler_times
from ..search.building_block import INTERVAL, BuildingBlock, v_block, walk
from .v_adaptive import fitting_blocks

__all__ = ["one_f_one_b_v", "v_half", "v_min"]


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
    block = BuildingBlock(walk((*forwards, f_to_b, *backwards)), INTERVAL)
    return _from_block(block, num_ranks, num_microbatches, costs, is_fused=True)


def _from_block(
    block: BuildingBlock,
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | None,
    memory: int = 0,
    is_fused: bool = False,
) -> Schedule:
    placement = v(num_ranks)
    memory = max(memory, block.peak(placement))
    setting = SearchSetting(placement, costs or Costs.unit(), memory, is_fused=is_fused)
    has_simpler_times = len(simpler_times(setting.costs)) > 1
    others = fitting_blocks(setting) if has_simpler_times and not is_fused else []
    return best_schedule([block, *others], setting, num_microbatches)
