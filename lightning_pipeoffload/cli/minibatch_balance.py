"""``pipeoffload-odc``: what on-demand communication would gain for texts of given lengths.

It is a Hydra application on conf/odc.yaml, and needs nothing but the lengths.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column, Table

from lightning_pipeoffload.cli.configuration import run_hydra_app
from lightning_pipeoffload.cli.plan_output import print_json
from lightning_pipeoffload.pictures import SMALL, new_figure, picture_path_error, save_figure
from lightning_pipeoffload.planning.figures import bare_table
from lightning_pipeoffload.schedule import share_text
from lightning_pipeoffload.texts.packing import Cost, check_packing, find_cost, pack

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from omegaconf import DictConfig

WAYS = (
    ("collective", "local_sort"),
    ("collective", "lb_micro"),
    ("on demand", "local_sort"),
    ("on demand", "lb_micro"),
    ("on demand", "lb_mini"),
)
"""How ranks communicate, and how texts are packed."""
REFERENCE = ("collective", "lb_micro")
"""The throughput of the others is relative to this one's."""
_DRAWN = (REFERENCE, ("on demand", "lb_mini"))

Timing = list[list[float]]
"""The cost of each microbatch of each rank in a minibatch."""


def report_balance(config: DictConfig) -> None:
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
    if config.lengths is None:
        counts |= {f"drawn.{name}": config.drawn[name] for name in ("texts", "longest")}
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} ({count}) must be a whole number from 1 on")
    lengths = _lengths(config)
    max_tokens = config.max_tokens or max(lengths)
    sizes = (config.num_ranks, config.samples_per_rank, max_tokens)
    results = compute_balances(lengths, *sizes, find_cost(config.cost))
    if config.picture is not None:
        _write_picture(results, Path(config.picture))
    if config.format == "json":
        rows = [{k: v for k, v in asdict(one).items() if k != "first"} for one in results]
        print_json({"texts": len(lengths), "ways": rows})
    else:
        title = f"{len(lengths)} texts, {sizes[0]} ranks, {sizes[1]} texts each per minibatch"
        Console().print(balance_table(results, title))


def balance_table(results: Sequence[Balance], title: str) -> Table:
    numbers = [Column(name, justify="right") for name in ("time", "idle", "throughput")]
    table = bare_table("communication", "shared out by", *numbers, title=title)
    for one in results:
        figures = f"{one.time:.1f}", f"{share_text(one.idle)}", f"{one.speedup:.2f}"
        table.add_row(one.communication, one.mode, *figures)
    return table


def sample_lengths(texts: int, mean: float, sigma: float, longest: int, seed: int) -> list[int]:
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
        if not config.drawn.mean:
            raise ValueError("drawn.mean (0) must be a number above 0")
        return sample_lengths(**config.drawn)
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


def _write_picture(results: Sequence[Balance], path: Path) -> None:
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"picture ({path}) must be an .svg or a .png")
    if reason := picture_path_error(path):
        raise ValueError(f"picture ({path}) cannot be written: {reason}")
    drawn = [one for one in results if (one.communication, one.mode) in _DRAWN]
    save_figure(draw_balances(drawn), path)


@dataclass(frozen=True)
class Balance:
    """The time that ranks take for given texts.

    Attributes:
        communication: "collective": ranks wait for each other at every layer; "on demand": once per
            minibatch.
        mode: The packing.
        time: The time of all minibatches, in the unit of the cost.
        idle: The share of the ranks' time in which they wait.
        speedup: Throughput relative to ``REFERENCE``.
        first: The first minibatch.
    """

    communication: str
    mode: str
    time: float
    idle: float
    speedup: float
    first: Timing


def compute_balances(
    lengths: Sequence[int], num_ranks: int, samples_per_rank: int, max_tokens: int, cost: Cost
) -> list[Balance]:
    """Compare ``WAYS`` to train on texts in the given order.

    Args:
        lengths: The tokens of each text; texts after the last whole minibatch are left out.
        num_ranks: The number of ranks that share a minibatch.
        samples_per_rank: Texts of a minibatch, divided by the ranks.
        max_tokens: The largest number of tokens of a microbatch.
        cost: The cost of a text, from its length.

    Raises:
        ValueError: A text does not fit into a microbatch, or there is no whole minibatch.
    """
    size = num_ranks * samples_per_rank
    check_packing(lengths, max_tokens, REFERENCE[1])
    if len(lengths) < size:
        raise ValueError(
            f"{len(lengths)} texts make no minibatch of {num_ranks} ranks with {samples_per_rank} "
            f"each; give at least {size}"
        )
    starts = range(0, len(lengths) - size + 1, size)
    minibatches = [lengths[start : start + size] for start in starts]
    timings = {
        mode: [_timing(texts, num_ranks, max_tokens, cost, mode) for texts in minibatches]
        for mode in {mode for _, mode in WAYS}
    }
    times = {
        (communication, mode): sum(_minibatch_time(communication, of) for of in timings[mode])
        for communication, mode in WAYS
    }
    balances = []
    for (communication, mode), time in times.items():
        work = sum(sum(map(sum, timing)) for timing in timings[mode])
        idle, speedup = max(0.0, 1 - work / (num_ranks * time)), times[REFERENCE] / time
        balances.append(Balance(communication, mode, time, idle, speedup, timings[mode][0]))
    return balances


def _timing(texts: Sequence[int], num_ranks: int, max_tokens: int, cost: Cost, mode: str) -> Timing:
    shares = pack(texts, num_ranks, max_tokens, cost, mode)
    return [[sum(cost(texts[i]) for i in microbatch) for microbatch in share] for share in shares]


def _minibatch_time(communication: str, timing: Timing) -> float:
    """Return the time of a minibatch; with collectives each microbatch takes its longest rank's."""
    if communication == "collective":
        return sum(map(max, zip_longest(*timing, fillvalue=0.0)))
    return max(map(sum, timing))


_COLORS = ("#5b8fd6", "#9dbdea")  # of neighbours, in turn
_IDLE = "#eeeeee"


def draw_balances(balances: Sequence[Balance]) -> Figure:
    """Draw the first minibatch of several ways, one below the other, on one time axis."""
    num_ranks = len(balances[0].first)
    figure = new_figure(760, len(balances) * (20 * num_ranks + 50))
    all_axes = figure.subplots(len(balances), sharex=True, squeeze=False)[:, 0]
    for axes, balance in zip(all_axes, balances, strict=True):
        _draw(axes, balance, list(_spans(balance.communication, balance.first)))
    figure.tight_layout()
    return figure


Spans = list[tuple[float, float]]


def _spans(communication: str, timing: Timing) -> Iterator[Spans]:
    """Yield when each rank computes each of its microbatches."""
    if communication == "collective":
        slots = [max(slot) for slot in zip_longest(*timing, fillvalue=0.0)]
        starts = list(accumulate(slots, initial=0.0))
        for rank in timing:
            yield [(start, start + cost) for start, cost in zip(starts, rank, strict=False)]
        return
    for rank in timing:
        ends = list(accumulate(rank))
        yield [(end - cost, end) for end, cost in zip(ends, rank, strict=True)]


def _draw(axes: Axes, balance: Balance, ranks: list[Spans]) -> None:
    idle = share_text(balance.idle)
    title = f"{balance.communication}, {balance.mode}: idle {idle} of all minibatches"
    axes.set_title(title, loc="left", fontsize=1.2 * SMALL)
    end = max((span[1] for spans in ranks for span in spans), default=0.0)
    for rank, spans in enumerate(ranks):
        axes.broken_barh([(0, end)], (rank - 0.45, 0.9), facecolor=_IDLE)
        bars = [(start, stop - start) for start, stop in spans]
        colors = [_COLORS[number % 2] for number in range(len(bars))]
        axes.broken_barh(bars, (rank - 0.45, 0.9), facecolors=colors)
    names = [f"rank {rank}" for rank in range(len(ranks))]
    axes.set_yticks(range(len(ranks)), names, fontsize=SMALL)
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=SMALL)


def main() -> None:
    """Run the console script ``pipeoffload-odc``."""
    run_hydra_app("odc", report_balance)


if __name__ == "__main__":
    main()
