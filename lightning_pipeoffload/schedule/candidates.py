"""The options of ``schedule="auto"``, and the figures of their plans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from .families import FAMILIES
from .passes.offload import OffloadReport
from .schedule import Schedule
from .text import share_text

RECOMPUTATIONS = ("none", "cheap", "full")
"""The values of ``recompute``; each saves more memory than the one before."""

# Between plans whose times differ by a smaller share, the one with less memory is preferred.
_ABOUT_EQUAL = 0.001

# A plan that copies nothing is preferred to one that is faster by less than this.
_WORTH_COPYING = 0.01
# More chunks need more messages and longer searches, and gain little.
_CHUNK_COUNTS = (2, 3, 4)


def period_with_copy_penalty(period: float, copies: bool) -> float:
    """Return the time by which plans are compared: copies add a small penalty."""
    return period * (1 + _WORTH_COPYING * copies)


@dataclass(frozen=True)
class PlanOption:
    """A family of schedules in one size, with what is computed again, the head, and the cut.

    Slices of sequences are never chosen, for results depend on their number: all options have it.
    The cut balances times. Where devices are unlike in speed or memory, other cuts are tried too:
    the fastest of those whose stages' activations of ``num_kept`` microbatches fit; 0: by times
    alone.
    """

    schedule: str
    num_chunks: int
    num_microbatches: int
    recompute: str = "none"
    head_weight_grad: str = "W"
    num_sequence_slices: int = 1
    num_kept: int = 0

    def max_live_by_stage(self, num_ranks: int) -> tuple[int, ...]:
        """Return of how many microbatches each stage's activations fit by the cut; (): of any."""
        placement = self.placement(num_ranks)
        if not self.num_kept:
            return ()
        if self.num_chunks == 1:  # later ranks keep fewer
            return (*(min(self.num_kept, num_ranks - rank) for rank in placement),)
        return (self.num_kept,) * len(placement)

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        """Return the rank of every stage."""
        return FAMILIES[self.schedule].placement(num_ranks, self.num_chunks)


@dataclass(frozen=True)
class Candidate:
    """One way to run a step.

    Attributes:
        option: The option.
        offload: "none", "auto", "paged" (auto, but ranks wait for copies), a share, or "its own".
        postponed: The number of W's of its stage by which each W is delayed, so that the step of an
            optimizer on the host overlaps with them.
        reason: The reason why it was not chosen; empty if it was.
        period: Seconds from one step to the next; None without a plan, like the fields below.
        bubble: The idle share of the period.
        peak_memory: The largest memory of a rank; if that exceeds the limit, the least possible.
        makespan: Seconds of a single step.
        schedule: The plan.
        report: The report on its offload, if one was planned.
    """

    option: PlanOption
    offload: str
    reason: str = ""
    period: float | None = None
    bubble: float | None = None
    peak_memory: float | None = None
    makespan: float | None = None
    schedule: Schedule | None = field(default=None, repr=False, compare=False)
    report: OffloadReport | None = field(default=None, repr=False, compare=False)
    postponed: int = 0

    @property
    def needs_more_memory(self) -> bool:
        """Whether it was refused because it needs more memory than the limit."""
        return self.peak_memory is not None and not self.fits

    @property
    def fits(self) -> bool:
        """Whether there is a plan within the limits."""
        return self.period is not None

    @property
    def score(self) -> float:
        """The period, with a small penalty for copies; infinite without a plan."""
        if self.period is None:
            return inf
        return period_with_copy_penalty(self.period, self.offload != "none")

    @property
    def without_schedule(self) -> Candidate:
        """The candidate without its schedule, for sending to other processes."""
        return replace(self, schedule=None, report=None)

    def report_row(self) -> dict[str, Any]:
        """Return the candidate's row of a report."""
        names = ("offload", "postponed", "fits", "period", "makespan", "bubble", "peak_memory")
        return {
            **vars(self.option),
            **{name: getattr(self, name) for name in names},
            "reason": self.reason,
        }

    def with_rejection_reason(self, best: Candidate) -> Candidate:
        """Return this candidate with the reason why ``best`` was chosen instead."""
        if self is best or self.period is None or best.period is None:
            return self
        longer = self.period / best.period - 1 if best.period else 0.0
        if longer > _ABOUT_EQUAL:
            return replace(self, reason=f"{share_text(longer)} longer")
        if self.score > best.score * (1 + _ABOUT_EQUAL):
            return replace(self, reason=f"{share_text(max(0.0, -longer))} faster, but copies")
        return replace(self, reason="no less memory")


def best_candidate(candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the fastest candidate that fits; among about equal ones, that with least memory."""
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        return None
    least = min(candidate.score for candidate in fitting) * (1 + _ABOUT_EQUAL)
    equal = [candidate for candidate in fitting if candidate.score <= least]
    return min(equal, key=lambda candidate: (candidate.peak_memory, candidate.score))


def options(
    num_microbatches: Iterable[int],
    most_chunks: int | None = None,
    num_chunks: int | None = None,
    recompute: Iterable[str] = ("none",),
    head_weight_grad: Iterable[str] = ("W",),
    num_sequence_slices: int = 1,
) -> list[PlanOption]:
    """List the options.

    Args:
        num_microbatches: The numbers of microbatches to try.
        most_chunks: The most stages per rank for which there are enough blocks; None: any.
        num_chunks: The only number of stages per rank to try; None: any.
        recompute: The values of ``recompute`` to try.
        head_weight_grad: The actions to try that compute the head's weight gradient.
        num_sequence_slices: Slices of each sequence; above 1 only families that have slices.
    """
    counts, heads = list(num_microbatches), list(head_weight_grad)
    return [
        PlanOption(name, chunks, count, recomputation, head, num_sequence_slices)
        for recomputation in recompute
        for head in heads
        for count in counts
        for name, recipe in FAMILIES.items()
        if recipe.can_slice == (num_sequence_slices > 1)
        for chunks in _chunk_counts(name, most_chunks, num_chunks)
    ]


def _chunk_counts(name: str, most: int | None, wanted: int | None) -> list[int]:
    recipe = FAMILIES[name]
    ends = [end for end in (recipe.max_chunks, most) if end is not None]
    counts = {recipe.num_chunks, *_CHUNK_COUNTS} if wanted is None else {wanted}
    return sorted(n for n in counts if recipe.num_chunks <= n <= min(ends, default=n))
