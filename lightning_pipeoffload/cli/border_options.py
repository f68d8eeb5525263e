"""What stands between two steps in ``pipeoffload-plan``: a barrier of all ranks, or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from lightning_pipeoffload.schedule import ScheduleError

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["BorderOptions"]

_IF_FREE = "as if nothing clipped by norm nor scaled the loss"
_WAYS = ("auto", "barrier", "post_validation")


class BorderOptions(NamedTuple):
    """How steps follow each other.

    Attributes:
        has_barrier: Whether no rank begins a step before all have ended the one before.
        num_drawn: Steps that a picture shows.
        is_known: Whether that was said; "auto" depends on what a run does between two steps.
    """

    has_barrier: bool = False
    num_drawn: int = 1
    is_known: bool = True

    @classmethod
    def of(cls, config: DictConfig) -> BorderOptions:
        """Read ``strategy.optimizer_sync`` and ``picture.steps``.

        Only "barrier" is one; "auto" is one in a run that clips by norm or has a loss scale, of
        which a plan does not know.

        Raises:
            ScheduleError: One of them is not what it can be.
        """
        way = config.strategy.optimizer_sync
        if way not in _WAYS:
            named = ", ".join(_WAYS)
            raise ScheduleError(f"strategy.optimizer_sync ({way}) must be one of {named}")
        picture = config.picture
        steps = None if isinstance(picture, str) else picture.get("steps")
        if steps is not None and (not isinstance(steps, int) or steps < 1):
            raise ScheduleError(f"picture.steps ({steps}) must be a whole number from 1 on")
        return cls(way == "barrier", steps or 1, way != "auto")

    @property
    def words(self) -> str:
        """What a period is one of."""
        words = f"with{'' if self.has_barrier else 'out'} a barrier between steps"
        return words if self.is_known else f"{words}, {_IF_FREE}"
