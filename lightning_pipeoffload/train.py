"""``pipeoffload-train``: build what conf/train.yaml describes, and train it.

It is a Hydra application. Lightning's launcher starts it again for every further rank of a machine,
with the same command line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lightning_pipeoffload.cli.configuration import build, load_package, run_hydra_app
from lightning_pipeoffload.cli.job_folders import (
    name_folder_by_slurm_step,
    removing_unused_folder,
    run_job_in_subprocess,
    runs_in_sweeper_process,
)
from lightning_pipeoffload.schedule import ScheduleError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from omegaconf import DictConfig


def train(config: DictConfig) -> None:
    """Build the module, the data and the trainer that ``config`` describes; fit, and maybe test.

    Args:
        config: The configuration of conf/train.yaml with the command line's overrides.

    Raises:
        ValueError: Something cannot be built, or refuses to train, from this configuration.
        RuntimeError: A ValueError was raised later, in training.
        SweepJobError: A job of a sweep failed.
    """
    if runs_in_sweeper_process():
        run_job_in_subprocess("lightning_pipeoffload.train")
        return
    load_package()
    from lightning.pytorch import seed_everything  # noqa: PLC0415 - only now, it imports torch

    with removing_unused_folder():
        seed_everything(config.seed, workers=True, verbose=False)
        module, data, trainer = build(config, "model"), build(config, "data"), build_trainer(config)
        with refusals_on_rank_zero(trainer):
            trainer.fit(module, datamodule=data, ckpt_path=config.ckpt_path)
    if config.test:
        saved = trainer.checkpoint_callback
        trainer.test(module, datamodule=data, ckpt_path="best" if saved else None)


def build_trainer(config: DictConfig) -> Trainer:
    """Return the trainer of ``config``, with its strategy, loggers and callbacks that are not null.

    A progress bar and a checkpoint callback are left out where a flag of the trainer,
    ``enable_progress_bar=false`` say, forbids them.
    """
    from lightning.pytorch.callbacks import (  # noqa: PLC0415 - as above
        Checkpoint,
        ProgressBar,
    )

    flags = {"enable_progress_bar": ProgressBar, "enable_checkpointing": Checkpoint}
    without = tuple(kind for flag, kind in flags.items() if not config.trainer.get(flag, True))
    loggers = [entry for entry in build(config, "logger").values() if entry is not None]
    callbacks = [entry for entry in build(config, "callbacks").values() if entry is not None]
    callbacks = [callback for callback in callbacks if not isinstance(callback, without)]
    parts = {"logger": loggers, "callbacks": callbacks, "strategy": build(config, "strategy")}
    return build(config, "trainer", **parts)


@contextmanager
def refusals_on_rank_zero(trainer: Trainer) -> Iterator[None]:
    """Raise a ValueError only on global rank 0 before training begins: it is a refusal.

    So is a memory limit that no plan keeps, which the first steps must measure. The other ranks
    refuse for the same reason and exit without repeating it, if global rank 0 has started them:
    srun and torchrun end all ranks as soon as one has ended, maybe before rank 0 has written why.
    Another ValueError of a later step becomes a RuntimeError, which shows its traceback.

    Raises:
        SystemExit: The run is refused, and global rank 0 says why.
        RuntimeError: A later step raised a ValueError.
    """
    try:
        yield
    except ValueError as error:
        if trainer.global_step and not isinstance(error, ScheduleError):
            raise RuntimeError(f"training failed after {trainer.global_step} steps") from error
        if not trainer.is_global_zero and _lightning_launches_ranks(trainer):
            raise SystemExit(2) from error
        raise


def _lightning_launches_ranks(trainer: Trainer) -> bool:
    from lightning.fabric.plugins.environments.lightning import (  # noqa: PLC0415 - as above
        LightningEnvironment,
    )

    environment = getattr(trainer.strategy, "cluster_environment", None)
    return isinstance(environment, LightningEnvironment)


def main() -> None:
    """Run the console script ``pipeoffload-train``."""
    name_folder_by_slurm_step()
    run_hydra_app("train", train)


if __name__ == "__main__":
    main()
