"""Lightning's callbacks that cannot do over a pipeline what they do on one device."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn

_AVERAGES = (
    "averages a copy of the whole module, of which each rank trains its own part; average "
    "checkpoints after training instead"
)
_REFUSED: dict[type[Callback], str] = {
    StochasticWeightAveraging: _AVERAGES,
    WeightAveraging: _AVERAGES,
    ModelPruning: (
        "takes parameters out of the module, which is cut by their names, and compares weights of "
        "all its layers; prune the checkpoint after training instead"
    ),
}


def check_callbacks(trainer: Trainer) -> None:
    """Refuse callbacks that would be wrong.

    Raises:
        ValueError: says which, why, and what would do.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined] # set at run time
        if isinstance(callback, BatchSizeFinder) and trainer.world_size > 1:
            raise ValueError(
                "the batch size finder is not supported over several ranks, as with Lightning's "
                "distributed strategies: what fits depends on the plan, which a trial that runs "
                "out of memory would leave half done; use memory_limit, or devices=1"
            )
        for kind, reason in _REFUSED.items():
            if isinstance(callback, kind) and trainer.state.fn == TrainerFn.FITTING:
                raise ValueError(f"{type(callback).__name__} {reason}")
