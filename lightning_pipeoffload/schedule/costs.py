"""Seconds and memory of the actions of every stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import inf

from .actions import Kind, ScheduleError

__all__ = ["Costs", "PerStage"]

PerStage = float | Sequence[float]

_LEAST, _MOST = 1e-100, 1e100


@dataclass(frozen=True)
class Costs:
    """Seconds per action and memory per activation, of a stage and one microbatch.

    Each is one number for all stages, or a sequence with one number for every global stage. With
    ``v`` chunks per rank a stage is ``1/v`` of a rank. Memory is in a unit of the caller's choice.

    Attributes:
        forward: Seconds of F.
        backward_input: Seconds of B.
        backward_weight: Seconds of W; BW takes the sum of both.
        communication: Seconds of a hop between a stage and the next one, either way, if they are on
            different ranks; in a sequence, of the hop after each stage. The sender is not held up.
        activation: Memory that F keeps.
        weight_residue: Memory that is alive from the end of B to the end of W; None: as much as
            ``activation``.
        offload: Seconds of the copy of one activation to the host; a part of it takes its share.
        reload: Seconds of the copy back.
        weight_input: The part of ``activation`` and ``weight_residue`` that only W needs, so that
            it can stay on the host until then.
        reduce: Seconds of REDUCE, of a stage and all its microbatches together.
        step: Seconds of the optimizer's step on the host, of a stage. A plan with STEP takes them
            beside its last W's, any other one after the rank's last action.
        copy_lanes: Copies that a device makes at a time: 1 where both directions take turns, 2
            where each has a lane of its own.
        ranks_per_link: Neighbouring ranks whose devices share a link to the host, 2 where pairs of
            them are behind one switch: of their copies in one direction one runs at a time.
    """

    forward: PerStage
    backward_input: PerStage
    backward_weight: PerStage
    communication: PerStage = 0.0
    activation: PerStage = 1.0
    weight_residue: PerStage | None = None
    offload: PerStage = 0.0
    reload: PerStage = 0.0
    weight_input: PerStage = 0.0
    reduce: PerStage = 0.0
    step: PerStage = 0.0
    copy_lanes: int = 1
    ranks_per_link: int = 1

    def __post_init__(self) -> None:
        if self.weight_residue is None:
            object.__setattr__(self, "weight_residue", self.activation)
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Sequence):
                object.__setattr__(self, field.name, tuple(value))
            _check_cost(field.name, value)
        if self.copy_lanes not in (1, 2):
            raise ScheduleError(f"costs.copy_lanes ({self.copy_lanes}) must be 1 or 2")
        if not isinstance(self.ranks_per_link, int) or self.ranks_per_link < 1:
            raise ScheduleError(
                f"costs.ranks_per_link ({self.ranks_per_link}) must be a whole number from 1 on; "
                "use 1 where every device has a link of its own, 2 where pairs share one"
            )

    @classmethod
    def unit(cls) -> Costs:
        """Return F = B = W = 1 second and an activation of 1, the unit of the papers' figures."""
        return cls(forward=1.0, backward_input=1.0, backward_weight=1.0)

    def per_stage(self, name: str, num_stages: int) -> tuple[float, ...]:
        """Return one cost of every stage.

        Args:
            name: A field of this class, such as ``"forward"``.

        Raises:
            ScheduleError: The cost is a sequence of another length.
        """
        value = getattr(self, name)
        if not isinstance(value, tuple):
            return (float(value),) * num_stages
        if len(value) != num_stages:
            raise ScheduleError(
                f"costs.{name} has {len(value)} values, and the schedule {num_stages} stages; "
                f"give one number, or {num_stages}"
            )
        return value

    def compute(self, num_stages: int) -> dict[Kind, tuple[float, ...]]:
        """Return the seconds of F, B and W of every stage."""
        names = {Kind.F: "forward", Kind.B: "backward_input", Kind.W: "backward_weight"}
        return {kind: self.per_stage(name, num_stages) for kind, name in names.items()}

    def hops(self, placement: Sequence[int]) -> tuple[float, ...]:
        """Return the seconds from every stage to the next one, 0 if both are on one rank."""
        seconds = self.per_stage("communication", len(placement))
        to = (*placement[1:], placement[-1])
        hops = zip(seconds, placement, to, strict=True)
        return tuple(second if here != there else 0.0 for second, here, there in hops)


def _check_cost(name: str, value: PerStage) -> None:
    numbers = value if isinstance(value, Sequence) else (value,)
    if not numbers or not all(isinstance(n, (int, float)) and 0 <= n < inf for n in numbers):
        raise ScheduleError(
            f"costs.{name} ({value}) must be a number from 0 on, or one for each stage"
        )
    if any(n and not _LEAST <= n <= _MOST for n in numbers):
        raise ScheduleError(
            f"costs.{name} ({value}) must be 0 or from {_LEAST:g} to {_MOST:g}, so that sums and "
            f"shares of it are numbers; use a larger or smaller unit"
        )
