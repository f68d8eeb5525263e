"""A schedule as data: for every rank, the order of its actions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path

from .actions import COPIES, FINAL, TRANSFERS, Action, Kind
from .torch_csv import read_csv, write_csv

__all__ = ["Schedule", "from_numbers", "to_numbers"]


@dataclass(frozen=True, repr=False)
class Schedule:
    """The actions of every rank, in order; immutable, hashable, and equal by its actions alone.

    The sizes and the placement of stages are read off the actions, so that they cannot disagree.

    Attributes:
        actions: The actions of each rank, in the order in which it runs them.
        name: The name of the schedule in reports and errors.
    """

    actions: tuple[tuple[Action, ...], ...]
    name: str = field(default="custom", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "actions", tuple(tuple(rank) for rank in self.actions))

    @classmethod
    def of(cls, actions: Iterable[Iterable[Action]], name: str = "custom") -> Schedule:
        """Make a schedule from any nesting of iterables, one for each rank."""
        return cls(tuple(tuple(rank) for rank in actions), name)

    @classmethod
    def from_csv(cls, path: str | PathLike[str]) -> Schedule:
        """Read a schedule in the compute-only format of ``torch.distributed.pipelining``.

        Copies, REDUCE and STEP that ``to_csv`` wrote are read as well.

        Args:
            path: A file with one line per rank; its stem becomes the name.

        Raises:
            ScheduleError: A cell is no compute action, with copies, REDUCE and STEP or without.
        """
        return cls.of(read_csv(path), name=Path(path).stem)

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write the schedule for ``torch.distributed.pipelining``, one line per rank.

        A copy, REDUCE or STEP stands in the cell of the compute action before it, where torch does
        not read it.

        Raises:
            ScheduleError: The schedule is lowered; a plan is lowered anew.
        """
        write_csv(path, self.actions)

    def __iter__(self) -> Iterator[tuple[Action, ...]]:
        return iter(self.actions)

    def __len__(self) -> int:
        return len(self.actions)

    def __getitem__(self, rank: int) -> tuple[Action, ...]:
        return self.actions[rank]

    def __repr__(self) -> str:
        return (
            f"Schedule({self.name!r}, num_ranks={self.num_ranks}, num_stages={self.num_stages}, "
            f"num_microbatches={self.num_microbatches})"
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
        return 1 + max((action.microbatch for rank in self for action in rank), default=-1)

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
        """REDUCE or STEP, where it has one behind the last gradients of each stage."""
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


_KINDS = tuple(Kind)


def to_numbers(schedule: Schedule) -> list[list[int]]:
    """Return three numbers per action of each rank: kind, stage and microbatch."""
    return [
        [number for a in rank for number in (_KINDS.index(a.kind), *a[1:])] for rank in schedule
    ]


def from_numbers(ranks: Sequence[Sequence[int]], name: str) -> Schedule:
    """Return the schedule that :func:`to_numbers` has written; it is not validated.

    Raises:
        ValueError: A rank's numbers are not three for each action.
        IndexError: There is no such kind of action.
    """
    return Schedule.of(
        (
            [Action(_KINDS[kind], *place) for kind, *place in zip(*[iter(rank)] * 3, strict=True)]
            for rank in ranks
        ),
        name,
    )
