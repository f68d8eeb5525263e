"""``pipeoffload-odc``: what on-demand communication would gain for texts of given lengths.

It is a Hydra application on conf/odc.yaml, and needs nothing but the lengths.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column, Table

from lightning_pipeoffload.cli.configuration import run_hydra_app
from lightning_pipeoffload.cli.plan_output import print_json
from lightning_pipeoffload.odc.balance import REFERENCE, Balance, balances, draw_balances
from lightning_pipeoffload.odc.packing import find_cost
from lightning_pipeoffload.pictures.figures import save_figure
from lightning_pipeoffload.planning.figures import bare_table
from lightning_pipeoffload.schedule.quantities import share_text

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["balance", "main"]

_DRAWN = (REFERENCE, ("on demand", "lb_mini"))


def balance(config: DictConfig) -> None:
    """Print how long ranks wait for each other, with collectives and on demand.

    Args:
        config: Conf/odc.yaml with the command line's overrides.

    Raises:
        ValueError: The lengths cannot be read or packed, or there is no such format or picture.
    """
    if config.format not in ("text", "json"):
        raise ValueError(f"format ({config.format}) must be text or json")
    counts = {name: config[name] for name in ("num_ranks", "samples_per_rank")}
    if config.max_tokens is not None:
        counts["max_tokens"] = config.max_tokens
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} ({count}) must be a whole number from 1 on")
    lengths = _lengths(config)
    max_tokens = config.max_tokens or max(lengths)
    sizes = (config.num_ranks, config.samples_per_rank, max_tokens)
    found = balances(lengths, *sizes, find_cost(config.cost))
    if config.picture is not None:
        _draw(found, Path(config.picture))
    if config.format == "json":
        rows = [{k: v for k, v in asdict(one).items() if k != "first"} for one in found]
        print_json({"texts": len(lengths), "ways": rows})
    else:
        title = f"{len(lengths)} texts, {sizes[0]} ranks, {sizes[1]} texts each per minibatch"
        Console().print(balance_table(found, title))


def balance_table(found: Sequence[Balance], title: str) -> Table:
    numbers = [Column(name, justify="right") for name in ("time", "idle", "throughput")]
    table = bare_table("communication", "shared out by", *numbers, title=title)
    for one in found:
        figures = f"{one.time:.1f}", f"{share_text(one.idle)}", f"{one.speedup:.2f}"
        table.add_row(one.communication, one.mode, *figures)
    return table


def draw_lengths(texts: int, mean: float, sigma: float, longest: int, seed: int) -> list[int]:
    """Draw log-normal lengths; longer ones are cut."""
    draws = random.Random(seed)
    center = math.log(mean) - sigma**2 / 2
    drawn = (round(draws.lognormvariate(center, sigma)) for _ in range(texts))
    return [min(max(length, 1), longest) for length in drawn]


def _lengths(config: DictConfig) -> list[int]:
    if config.lengths is None:
        for name, value in config.drawn.items():
            if not isinstance(value, (int, float)) or value < 0:
                raise ValueError(f"drawn.{name} ({value}) must be a number from 0 on")
        return draw_lengths(**config.drawn)
    try:
        words = Path(config.lengths).read_text(encoding="utf-8").split()
        lengths = [int(word) for word in words]
    except (OSError, ValueError) as error:
        raise ValueError(
            f"lengths ({config.lengths}) must be a file with a whole number on each line: {error}"
        ) from error
    if not lengths:
        raise ValueError(f"lengths ({config.lengths}) is empty; give a number on each line")
    return lengths


def _draw(found: Sequence[Balance], path: Path) -> None:
    if path.suffix not in (".svg", ".png") or not path.parent.is_dir():
        raise ValueError(f"picture ({path}) must be an .svg or a .png in a folder that is there")
    drawn = [one for one in found if (one.communication, one.mode) in _DRAWN]
    save_figure(draw_balances(drawn), path)


def main() -> None:
    """Run the console script ``pipeoffload-odc``."""
    run_hydra_app("odc", balance)


if __name__ == "__main__":
    main()
