"""A schedule as data: for every rank, the order of its actions.

A placement is a tuple with the rank of every stage, in model order. Builders make one; other code
reads it from the schedule.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path

from .actions import COPIES, FINAL, TRANSFERS, Action, Kind, ScheduleError

_TORCH_NAMES = {Kind.F: "F", Kind.B: "I", Kind.W: "W", Kind.BW: "B"}
_KINDS_OF_TORCH = {name: kind for kind, name in _TORCH_NAMES.items()}


@dataclass(frozen=True, repr=False)
class Schedule:
    """The actions of every rank, in order; immutable, hashable, and compared by actions only.

    Sizes and placement are derived from the actions, so that they cannot disagree.

    Where a microbatch's sequences run slice by slice, an action's ``microbatch`` is a unit: slice k
    of microbatch m is unit ``m * num_sequence_slices + k``.

    Attributes:
        actions: The actions of each rank, in the order in which it runs them.
        name: The name of the schedule in reports and errors.
        num_sequence_slices: Slices of each microbatch along the sequence; 1: it runs as a whole.
    """

    actions: tuple[tuple[Action, ...], ...]
    name: str = field(default="custom", compare=False)
    num_sequence_slices: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "actions", tuple(tuple(rank) for rank in self.actions))
        if self.num_sequence_slices < 1:
            raise ScheduleError(
                f"num_sequence_slices ({self.num_sequence_slices}) must be a whole number from 1 "
                f"on; 1 runs each sequence as a whole"
            )

    @classmethod
    def of(
        cls, actions: Iterable[Iterable[Action]], name: str = "custom", num_sequence_slices: int = 1
    ) -> Schedule:
        """Make a schedule from any nesting of iterables, one for each rank."""
        return cls(tuple(tuple(rank) for rank in actions), name, num_sequence_slices)

    @classmethod
    def parse(cls, text: str, name: str = "custom", num_sequence_slices: int = 1) -> Schedule:
        """Read a schedule or a lowered plan as it prints, one line per rank; it is not validated.

        Raises:
            ScheduleError: A word is no action.
        """
        ranks = (map(Action.parse, rank.split()) for rank in text.splitlines())
        return cls.of(ranks, name, num_sequence_slices)

    def with_actions(self, actions: Iterable[Iterable[Action]]) -> Schedule:
        """Return other actions under the same name, with as many slices of a sequence."""
        return Schedule.of(actions, self.name, self.num_sequence_slices)

    @classmethod
    def from_csv(cls, path: str | PathLike[str]) -> Schedule:
        """Read a schedule in the compute-only format of ``torch.distributed.pipelining``.

        Copies, REDUCE and STEP that ``to_csv`` wrote are read as well.

        Args:
            path: A file with one line per rank; its stem becomes the name.

        Raises:
            ScheduleError: The file cannot be read or is no text, or a cell does not begin with a
                compute action.
        """
        try:
            with open(path, newline="") as file:
                rows = list(csv.reader(file))
        except (UnicodeDecodeError, csv.Error) as error:
            raise ScheduleError(
                f"{path} has no rows of text, one for each rank: {error}"
            ) from error
        except OSError as error:
            raise ScheduleError(
                f"schedule {str(path)!r} cannot be read: {error.strerror}; give the path of a file "
                f"that to_csv has written, or the name of a schedule"
            ) from None
        ranks = ([a for cell in row for a in _actions_in(cell, path)] for row in rows)
        return cls.of(ranks, name=Path(path).stem)

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write the schedule for ``torch.distributed.pipelining``, one line per rank.

        torch writes I for B and B for BW. A copy, REDUCE or STEP is written into the cell of the
        compute action before it, as in ``2F0 2OFFLOAD0``: torch reads a cell's first action only.

        Raises:
            ScheduleError: The plan has transfers, which ``lower`` adds again, a copy before all
                compute actions, or slices of sequences, which torch does not have.
        """
        if self.num_sequence_slices > 1:
            raise ScheduleError(
                f"schedule {self.name} has {self.num_sequence_slices} slices of each sequence, "
                f"which torch's format cannot say; write str(schedule), which "
                f"Schedule.parse(text, num_sequence_slices={self.num_sequence_slices}) reads"
            )
        rows = [list(_cells(rank)) for rank in self]
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows(rows)

    def __iter__(self) -> Iterator[tuple[Action, ...]]:
        return iter(self.actions)

    def __len__(self) -> int:
        return len(self.actions)

    def __getitem__(self, rank: int) -> tuple[Action, ...]:
        return self.actions[rank]

    def __repr__(self) -> str:
        count = self.num_sequence_slices
        slices = f", num_sequence_slices={count}" if count > 1 else ""
        return (
            f"Schedule({self.name!r}, num_ranks={self.num_ranks}, num_stages={self.num_stages}, "
            f"num_microbatches={self.num_microbatches}{slices})"
        )

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, rank)) for rank in self.actions)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the pipeline."""
        return len(self.actions)

    @cached_property
    def num_stages(self) -> int:
        """Number of stages on all ranks together."""
        return 1 + max((action.stage for rank in self for action in rank), default=-1)

    @cached_property
    def num_microbatches(self) -> int:
        """Number of microbatches of one step."""
        highest = max((action.microbatch for rank in self for action in rank), default=-1)
        return 1 + highest // self.num_sequence_slices

    @property
    def num_units(self) -> int:
        """Number of slices of all microbatches of one step, which actions count by."""
        return self.num_microbatches * self.num_sequence_slices

    @property
    def num_chunks(self) -> int:
        """Largest number of stages on one rank."""
        return max((len(self.stages_of(rank)) for rank in range(self.num_ranks)), default=0)

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of its actions."""
        return frozenset(action.kind for rank in self for action in rank)

    @property
    def has_transfers(self) -> bool:
        """Whether it contains SEND and RECV, as a lowered plan does."""
        return bool(self.kinds & TRANSFERS)

    @property
    def has_copies(self) -> bool:
        """Whether it offloads activations."""
        return bool(self.kinds & COPIES)

    @property
    def final_kind(self) -> Kind | None:
        """REDUCE or STEP, if it follows the last gradients of each stage; else None."""
        return next(iter(self.kinds & FINAL), None)

    @property
    def is_forward_only(self) -> bool:
        """Whether no rank computes a gradient."""
        return not self.kinds & {Kind.B, Kind.W, Kind.BW}

    @cached_property
    def _rank_by_stage(self) -> dict[int, int]:
        return {action.stage: rank for rank, actions in enumerate(self) for action in actions}

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank of every stage, in model order."""
        return tuple(map(self.rank_of, range(self.num_stages)))

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage."""
        return self._rank_by_stage[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in model order; the k-th is its chunk k."""
        return tuple(sorted(s for s, owner in self._rank_by_stage.items() if owner == rank))

    def crosses_ranks(self, stage: int) -> bool:
        """Whether a stage and the next one are on different ranks, so that a message is needed."""
        return 0 <= stage < self.num_stages - 1 and self.rank_of(stage) != self.rank_of(stage + 1)


def _cells(actions: Iterable[Action]) -> Iterator[str]:
    cell: list[str] = []
    for action in actions:
        if action.kind in _TORCH_NAMES:
            if cell:
                yield " ".join(cell)
            cell = [f"{action.stage}{_TORCH_NAMES[action.kind]}{action.microbatch}"]
        elif action.kind not in TRANSFERS and cell:
            cell.append(str(action))
        else:
            raise ScheduleError(
                f"{action} cannot be written: the format has compute actions, and copies after "
                "one; write the schedule from before lower()"
            )
    yield " ".join(cell)


def _actions_in(cell: str, path: str | PathLike[str]) -> Iterator[Action]:
    # torch's DualPipeV has cells such as (7F4;0B0)OVERLAP_F_B: read as one action after the other.
    overlapped = re.fullmatch(r"\((.*)\)OVERLAP_F_B", cell.strip())
    for text in overlapped[1].split(";") if overlapped else [cell]:
        first, *others = text.split() or [""]
        match = re.fullmatch(r"(\d+)([FIBW])(\d+)", first)
        if match:
            yield Action(_KINDS_OF_TORCH[match[2]], int(match[1]), int(match[3]))
            yield from map(Action.parse, others)
        elif first:
            raise ScheduleError(
                f"{first!r} in {path} is no compute action of torch's format; "
                "write stage, kind (F, I, W or B for both gradients) and microbatch, as in 2F0"
            )


def loop_placement(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Place stages round-robin: stage ``s`` is on rank ``s % num_ranks``.

    Three ranks of two chunks each::

        rank     0  1  2
        chunk 0  0  1  2
        chunk 1  3  4  5
    """
    return tuple(range(num_ranks)) * num_chunks


def v_placement(num_ranks: int, num_chunks: int = 2) -> tuple[int, ...]:
    """Place stages down the ranks and back up, so that neighbouring chunks meet on one rank.

    Three ranks of two chunks each::

        rank     0  1  2
        chunk 0  0  1  2
        chunk 1  5  4  3
    """
    down = tuple(range(num_ranks))
    return tuple(
        rank for chunk in range(num_chunks) for rank in (down[::-1] if chunk % 2 else down)
    )


def device_indices(placement: Sequence[int]) -> list[int]:
    """Return, for each pipeline rank, the index of its device in the user's list of devices.

    Device 0 runs the last stage, so that the process with Lightning's loggers has the loss. Where
    that is not rank 0, ranks count backwards from it; the list then gives each device's rank, too.

    Args:
        placement: The rank of every stage.
    """
    num_ranks, last = max(placement) + 1, placement[-1]
    return [(last - rank) % num_ranks if last else rank for rank in range(num_ranks)]


def stages_on(placement: tuple[int, ...], rank: int) -> list[int]:
    """Return the stages of one rank, in model order."""
    return [stage for stage, owner in enumerate(placement) if owner == rank]


_ADDS_IN = {Kind.F: (Kind.F,), Kind.B: (Kind.B,), Kind.W: (Kind.W,), Kind.BW: (Kind.B, Kind.W)}


def accumulates_in_same_order(
    one: Schedule, other: Schedule, tied: Iterable[Collection[int]] = ()
) -> bool:
    """Return whether each stage runs its F's, B's and W's in the same order in both schedules.

    Stages on one rank that share a weight accumulate into one gradient, so their B's and W's are
    compared together.

    Args:
        one: A schedule of compute actions.
        other: Another schedule of the same stages on the same ranks.
        tied: Stages that share a weight.
    """
    if one.num_sequence_slices != other.num_sequence_slices:
        return False
    if [_orders(rank) for rank in one] != [_orders(rank) for rank in other]:
        return False
    together = [set(stages) for stages in tied]
    return all(
        _gradients(ours, stages) == _gradients(theirs, stages)
        for ours, theirs in zip(one, other, strict=True)
        for stages in together
        if len({action.stage for action in ours} & stages) > 1
    )


def _orders(rank: Sequence[Action]) -> dict[tuple[int, Kind], list[int]]:
    orders: defaultdict[tuple[int, Kind], list[int]] = defaultdict(list)
    for action in rank:
        for kind in _ADDS_IN.get(action.kind, ()):
            orders[action.stage, kind].append(action.microbatch)
    return orders


def _gradients(rank: Sequence[Action], stages: Collection[int]) -> list[tuple[Kind, int, int]]:
    return [
        (kind, action.stage, action.microbatch)
        for action in rank
        for kind in _ADDS_IN.get(action.kind, ())
        if kind is not Kind.F and action.stage in stages
    ]
