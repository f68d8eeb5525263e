"""``pipeoffload-rehearse``: one rank of a large pipeline runs alone on this machine.

It is a Hydra application on conf/rehearse.yaml.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_pipeoffload.cli.configuration import load_package, run_hydra_app
from lightning_pipeoffload.schedule import ScheduleError, check_positive_integers

if TYPE_CHECKING:
    from omegaconf import DictConfig

_FORMATS = ("text", "json")


def rehearse(config: DictConfig) -> None:
    """Run the rank that ``config`` names alone, and print its times and its memory.

    Args:
        config: Conf/rehearse.yaml with the command line's overrides.

    Raises:
        ValueError: The model, its data or the plan cannot be, or there is no such rank.
    """
    if config.format not in _FORMATS:
        raise ScheduleError(f"format ({config.format}) must be one of {', '.join(_FORMATS)}")
    chunks = {} if config.num_chunks is None else {"num_chunks": config.num_chunks}
    counts = ("num_ranks", "num_microbatches", "num_steps")
    check_positive_integers(**{name: config[name] for name in counts}, **chunks)
    if not isinstance(config.rank, int) or not 0 <= config.rank < config.num_ranks:
        raise ScheduleError(
            f"rank ({config.rank}) must be from 0 to {config.num_ranks - 1}, of {config.num_ranks}"
        )
    if config.strategy.schedule == "auto":
        raise ScheduleError(
            "schedule (auto) is chosen in a run, or by pipeoffload-plan schedule=auto; name the "
            "one to rehearse"
        )
    load_package()
    from lightning_pipeoffload.cli.rehearsed_rank import run_rank  # noqa: PLC0415 - imports torch

    run_rank(config)


def main() -> None:
    """Run the console script ``pipeoffload-rehearse``."""
    run_hydra_app("rehearse", rehearse)


if __name__ == "__main__":
    main()
