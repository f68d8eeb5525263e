"""The Trainer that benchmarks measure: on CPUs, without what Lightning writes and prints itself."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer


def quiet_trainer(**options: Any) -> Trainer:
    """Return a Trainer.

    Args:
        **options: What else it is given.
    """
    return Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
