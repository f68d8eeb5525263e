"""``pipeoffload-train``: what conf/train.yaml describes is built and trained.

It is a Hydra application. Lightning's launcher starts it again for every further rank of the machine,
with the same command line.
"""

from hydra.utils import instantiate
from lightning.pytorch import Trainer, seed_everything
from omegaconf import DictConfig

from lightning_pipeoffload.configuration import run_hydra_app


def train(config: DictConfig) -> None:
    """Build the module, its data and the trainer that ``config`` names, and fit.

    Args:
        config: conf/train.yaml with the command line's overrides.
    """
    seed_everything(config.seed, workers=True, verbose=False)
    module = instantiate(config.model)
    data = instantiate(config.data)
    trainer = build_trainer(config)
    trainer.fit(module, datamodule=data, ckpt_path=config.ckpt_path)


def build_trainer(config: DictConfig) -> Trainer:
    """Return the trainer of ``config``, with its strategy and callbacks."""
    callbacks = [instantiate(callback) for callback in config.callbacks.values()]
    strategy = instantiate(config.strategy)
    return instantiate(config.trainer, strategy=strategy, callbacks=callbacks)


def main() -> None:
    """Run the console script ``pipeoffload-train``."""
    run_hydra_app("train", train)


if __name__ == "__main__":
    main()
