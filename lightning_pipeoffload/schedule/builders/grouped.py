"""Interleaved schedules that repeat one block: GIS, GIS-H, any group size, and PipeOffload.

Each rank has several stages. A group of microbatches goes through the first of them, then through
the second, and on; backwards likewise. B and W are apart, and W follows its B at once. What differs
is the size of the group: the smaller it is, the less memory, and the more bubble. Where the size
does not divide the microbatches, which the paper leaves open, W may wait and fill what is idle.

Source: Wan et al., "PipeOffload", ICML 2025, sections 3 and 4. Building takes n log n of the
actions. PO-H keeps about a quarter of the uniform block's peak, PO-F a number of activations that
does not grow with the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from math import gcd
from typing import NamedTuple

from ..actions import Action, Kind, ScheduleError
from ..costs import Costs
from ..passes.offload import offload_activations
from ..schedule import Schedule, loop_placement, stages_on
from ..search.list_schedule import fill_gaps
from ..search.order_rules import FixedOrder
from ..search.problem import SchedulingProblem
from ..simulation.memory import peak_memory


def equal_groups(num_ranks: int, num_microbatches: int, num_chunks: int, *, group: str) -> Schedule:
    """Groups of one size: GIS, GIS-H, and PipeOffload's uniform block.

    GIS has groups of all ranks' number: the bubble of ZB-H1, (p - 1)(F + B) seconds of a stage,
    which is a v-th of a rank, in the memory of 1F1B: the first rank keeps p * v activations of a
    stage.

    ``draw(build("gis", 2, 3))``::

        rank 0 0F0 0F1 2F0 2F1 ....2B0 2W0 0F2 2B1 2W1 2F2 0B0 0W0 0B1 2B2 0W1 0B2 2W2 0W2
        rank 1 ....1F0 1F1 3F0 3B0 3F1 3B1 3W0 1F2 1B0 3W1 3F2 1B1 3B2 1W0 1B2 1W1 3W2 1W2

    GIS-H has groups of half of it, the smallest whose first gradient returns in time: about half as
    many activations, for a bubble that is larger by (v - 1) * p / 2 times F + B - W of a stage.

    ``draw(build("gis_h", 2, 3))``::

        rank 0 0F0 ....2F0 0F1 ....2B0 2W0 2F1 0B0 0W0 0F2 2B1 2W1 2F2 0B1 0W1 ....2B2 2W2 0B2 0W2
        rank 1 ....1F0 ....3F0 3B0 3W0 1F1 1B0 1W0 3F1 3B1 3W1 1F2 1B1 1W1 3F2 3B2 3W2 1B2 1W2 ....

    The uniform block has groups of one, for activations that are offloaded. Without offload it
    takes about the memory of GIS-H, but the first stages of a rank hold most of it: half of the
    stages offloaded frees three quarters.

    ``draw(build("uniform", 4, 4))``::

        rank 0 F F ....F F F F ......B W F ....B W F B W ..B W ..B W B W B W B W
        rank 1 ..F F ....F F F ....B W F ..F B W ..B W F B W ..B W B W B W B W ..
        rank 2 ....F F ....F F ..B W F ..F B W F B W ..B W F B W B W B W B W ....
        rank 3 ......F F ....F B W F ..F B W F B W F B W B W F B W B W B W ......

    Args:
        group: "all", "half" or "one".
    """
    sizes = {"all": num_ranks, "half": _half(num_ranks), "one": 1}
    return _build_grouped(num_ranks, num_microbatches, num_chunks, sizes[group])


def grouped(
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int,
    *,
    group_size: int | None = None,
    costs: Costs | None = None,
    memory_limit: float | None = None,
) -> Schedule:
    """Groups of any size from half of the ranks to all of them.

    With g microbatches in a group, rank i of p keeps g(v-1) + p - i activations of a stage. The
    bubble at equal times is that of GIS and (p-g)(v-1) slots more, if g divides the microbatches.
    Otherwise the groups are unequal, W waits for idle slots, every rank may keep as many as the
    first, and the bubble is a few slots larger (with 2 to 4 chunks up to 3 for 8 ranks, 8 for 16,
    in what was tried). With fewer microbatches than ranks it is what one microbatch takes to go
    down the stages and back.

    Args:
        group_size: Microbatches of a group; None: the most that ``memory_limit`` allows.
        costs: The memory of an activation.

    Raises:
        ScheduleError: The groups are too small or too large.
    """
    sizes = range(_half(num_ranks), num_ranks + 1)
    if group_size is not None:
        _check_group_size(group_size, sizes, num_ranks)
        return _build_grouped(num_ranks, num_microbatches, num_chunks, group_size)
    # The largest groups have the least bubble. Where not even the smallest fit, ``build`` says so.
    for size in reversed(sizes):
        schedule = _build_grouped(num_ranks, num_microbatches, num_chunks, size)
        needed = max(peak_memory(schedule, costs or Costs.unit()))
        if memory_limit is None or needed <= memory_limit:
            break
    return schedule


def _check_group_size(group_size: int, sizes: range, num_ranks: int) -> None:
    if group_size not in sizes:
        raise ScheduleError(
            f"group_size ({group_size!r}) must be from {sizes[0]} to {sizes[-1]} for {num_ranks} "
            f"ranks; use {sizes[0]} for the least memory, or schedule=uniform"
        )


def _half(num_ranks: int) -> int:
    return -(-num_ranks // 2)


class _Group(NamedTuple):
    """Microbatches that go through a stage together.

    Attributes:
        microbatches: Which ones.
        room: Slots that the group has in every stage; those that it does not fill stay empty.
        start: The slot of its first forward.
    """

    microbatches: range
    room: int
    start: int


@lru_cache(maxsize=64)  # the search for a plan asks again for other costs
def _build_grouped(
    num_ranks: int, num_microbatches: int, num_chunks: int, group_size: int
) -> Schedule:
    """Repeat the building block for one group after the other, and drop the slots that stay empty.

    A slot of a rank has room for one F and for one B with its W. The gradient of the first
    microbatch comes back to a rank one slot later for each rank after it.
    """
    placement = loop_placement(num_ranks, num_chunks)
    block = _stage_entry_slots(num_ranks, num_chunks, group_size)
    groups = _groups(num_microbatches, num_chunks, group_size, least=_half(num_ranks))
    turn = block[-1] * groups[0].room

    def order(rank: int) -> list[Action]:
        stages = stages_on(placement, rank)
        return_slot = turn + num_ranks - 1 - rank
        timed = list(_slots((Kind.F,), stages, block, groups))
        timed += [
            (return_slot + slot, action)
            for slot, action in _slots((Kind.B, Kind.W), stages[::-1], block, groups)
        ]
        # Sorting is stable: in one slot F comes first, then B, then W.
        return [action for _, action in sorted(timed, key=lambda item: item[0])]

    schedule = Schedule.of(order(rank) for rank in range(num_ranks))
    if num_microbatches % group_size == 0:
        return schedule
    peak = group_size * (num_chunks - 1) + num_ranks
    return _fill_with_weight_gradients(schedule, placement, peak)


def _fill_with_weight_gradients(
    schedule: Schedule, placement: tuple[int, ...], memory: int
) -> Schedule:
    """Keep the order of F and B, and let W fill the slots in which a rank would wait.

    ``memory`` is enough for W at once, so the run never gets stuck: before F, W makes room.
    """
    costs = replace(Costs.unit(), weight_residue=1)
    problem = SchedulingProblem(placement, schedule.num_microbatches, costs, memory)
    last = 2 * problem.num_stages - 1
    ranks = (
        [stage if kind is Kind.F else last - stage for kind, stage, _ in rank if kind is not Kind.W]
        for rank in schedule
    )
    order = FixedOrder(problem, ranks, overtaking=False)
    filled = fill_gaps(problem, order, patience=0.0)
    return problem.operations.as_schedule(filled.order) if filled.order else schedule


def _stage_entry_slots(num_ranks: int, num_chunks: int, group_size: int) -> list[int]:
    """Return when a group enters each stage of a rank, in slots per microbatch of a group.

    Half of the ranks' number of slots later, what a stage has computed is back at the rank. A block
    is repeated every ``num_chunks``; where a stage would meet one of another repetition, it waits.
    """
    hop = -(-_half(num_ranks) // group_size)
    num_before_collision = num_chunks // gcd(num_chunks, hop)
    return [hop * chunk + chunk // num_before_collision for chunk in range(num_chunks)]


def _groups(num_microbatches: int, num_chunks: int, group_size: int, least: int) -> list[_Group]:
    """Cut the microbatches into as few groups as there can be, of sizes that differ by one at most.

    A group of fewer than ``least`` would wait for its own results, so it has the room of that many;
    not so the groups that are small by design.
    """
    num_groups = -(-num_microbatches // group_size)
    bounds = [num_microbatches - num_microbatches * n // num_groups for n in range(num_groups + 1)]
    members = [range(*pair) for pair in zip(bounds[::-1], bounds[-2::-1], strict=False)]
    rooms = [max(len(group), min(least, group_size)) for group in members]
    starts = accumulate((num_chunks * room for room in rooms), initial=0)
    return [_Group(*group) for group in zip(members, rooms, starts, strict=False)]


def _slots(
    kinds: tuple[Kind, ...], stages: list[int], block: list[int], groups: list[_Group]
) -> Iterator[tuple[int, Action]]:
    for group in groups:
        for stage, offset in zip(stages, block, strict=True):
            for place, microbatch in enumerate(group.microbatches):
                slot = group.start + group.room * offset + place
                yield from ((slot, Action(kind, stage, microbatch)) for kind in kinds)


UNMEASURED = Costs(1.0, 1.0, 1.0, offload=1.5, reload=1.5)
"""Before anything is known: k = 1, at which copies of everything are just about hidden."""


def offloaded(
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int,
    *,
    amount: str,
    costs: Costs | None = None,
) -> Schedule:
    """The uniform block with half of each rank's stages offloaded, or all of them (PO-H, PO-F).

    Half are the stages that live longest. Of two ranks with two stages each, the first does this
    in PO-H with two microbatches; a copy that OFFLOAD or RELOAD starts runs on a lane of its own,
    during the F, B and W that follow::

        0F0 0OFFLOAD0 2F0 0FREE0 0F1 0OFFLOAD1 2B0 0RELOAD0 2W0 0FREE1 2F1 0B0 0W0 0RELOAD1 ...

    Args:
        amount: "half" or "full"; less of it where copies would not come back in time.
        costs: The costs of the stages, copies among them; None: copying out and back takes as long
            as F, B and W.
    """
    uniform = _build_grouped(num_ranks, num_microbatches, num_chunks, group_size=1)
    return offload_activations(uniform, costs or UNMEASURED, amount)[0]
