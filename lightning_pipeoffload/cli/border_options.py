"""What stands between two steps in ``pipeoffload-plan``: a barrier of all ranks, or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_pipeoffload.schedule import ScheduleError

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["BorderOptions"]

_WAYS = ("barrier", "post_validation")


class BorderOptions(NamedTuple):
    """How steps follow each other.

    Attributes:
        has_barrier: Whether no rank begins a step before all have ended the one before.
        num_drawn: Steps that a picture shows.
    """

    has_barrier: bool = False
    num_drawn: int = 1

    @classmethod
    def of(cls, config: DictConfig) -> BorderOptions:
        """Read ``strategy.optimizer_sync``, what makes such a run wait, and ``picture.steps``.

        Ranks wait where the trainer clips by norm or its precision has a loss scale.

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
        return cls(way == "barrier" and _needs_others(config.get("trainer") or {}), steps or 1)

    @property
    def words(self) -> str:
        """What a period is one of."""
        return f"with{'' if self.has_barrier else 'out'} a barrier between steps"


def _needs_others(trainer: Any) -> bool:
    by_norm = trainer.get("gradient_clip_algorithm") != "value"
    is_scaled = str(trainer.get("precision")) in ("16", "16-mixed")
    return is_scaled or (bool(trainer.get("gradient_clip_val")) and by_norm)
