"""How much of an optimizer's step on the host is hidden, where computing and stepping take no core.

Blocks sleep in F, B and W, and the optimizer's step sleeps so many percent of a rank's work in a
step. Nothing needs all gradients, so buckets step during the last W's, of which the plan postpones
as many as that takes; with ``--clip`` the step begins after the norm of all ranks.

    python -m examples.benchmarks.host_step_emulated --p 4 --schedules zb_h1 zb_v

"/ without" is the time from one step to the next over that of the same schedule with the optimizer
on the device, whose step takes no time; "planned" is the same by the simulator, for the plan in
use. "Tail" is how many W's each stage has at least after its last B.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.optim import sgd
from torch.utils.data import DataLoader

from examples.benchmarks.emulated import TimedStrategy, alike_samples
from examples.benchmarks.harness import (
    FEATURES,
    EmulatedModel,
    quiet_trainer,
    run_ranks,
    write_results,
)
from lightning_pipeoffload.optimizers import host_step
from lightning_pipeoffload.schedule import Costs, build, tails
from lightning_pipeoffload.schedule.simulation import steady_period

NUM_WEIGHTS = 24  # of a rank: as many buckets; one of 8B parameters over eight ranks has more
WARM_UP = 8  # steps: four until the plan is made with what they have taken


def step_sleeps(seconds: float) -> None:
    """Let the step of SGD sleep so long for each parameter, in buckets of one."""
    compute: Callable[..., Any] = sgd.sgd

    def slow(parameters: list[Any], *args: Any, **kwargs: Any) -> None:
        compute(parameters, *args, **kwargs)
        time.sleep(seconds * len(parameters))

    patched: Any = sgd
    patched.sgd = slow
    buckets: Any = host_step
    buckets.STAGING_BYTES = 2 * 4 * FEATURES


def measure(given: argparse.Namespace, schedule: str, percent: float) -> list[float]:
    """Train on this rank; return the period, that of the plan in use, and the shortest tail."""
    p, m, seconds = given.p, given.m, given.milliseconds / 1e3
    step = percent / 100 * 3 * m * seconds
    if percent:
        step_sleeps(step / NUM_WEIGHTS)
    num_chunks = build(schedule, p, m).num_chunks
    samples = alike_samples(m * (given.steps + WARM_UP), torch.zeros(FEATURES))
    strategy = TimedStrategy(
        schedule=schedule, num_microbatches=m, split="even", optimizer_offload=percent > 0
    )
    trainer = quiet_trainer(
        devices=p,
        strategy=strategy,
        max_epochs=1,
        gradient_clip_val=1.0 if given.clip else None,  # norms are smaller
    )
    num_weights = NUM_WEIGHTS // num_chunks
    model = EmulatedModel(p * num_chunks, seconds / num_chunks, num_weights=num_weights)
    trainer.fit(model, DataLoader(samples, batch_size=m))
    f = b = w = seconds / num_chunks
    of_stage = Costs(f, b, w, step=step / num_chunks)
    planned = steady_period(strategy.plan, of_stage, given.clip)
    tail = min((len(tail.weights) for rank in strategy.plan for tail in tails(rank)), default=0)
    return [strategy.times.take(given.steps - 1).wall, planned, tail]


def read_arguments(line: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--p", type=int, default=4, help="ranks")
    parser.add_argument("--m", type=int, help="microbatches; default: 2p")
    parser.add_argument("--milliseconds", type=float, default=10, help="of a rank's F, B or W")
    parser.add_argument("--schedules", nargs="+", default=["zb_h1", "zb_v"])
    parser.add_argument("--percent", type=float, nargs="+", default=[5, 10, 15, 20])
    parser.add_argument("--clip", action="store_true", help="clip gradients by their norm")
    parser.add_argument("--steps", type=int, default=20, help="measured steps")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    given = parser.parse_args(line)
    given.m = given.m or 2 * given.p
    return given


def main(line: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    given = read_arguments(line)
    if given.results:
        write_results(lambda: measure(given, *json.loads(given.case)), given.results)
        return
    clipped = ", clipped" * given.clip
    table = Table(title=f"p = {given.p}, m = {given.m}, {given.milliseconds:g} ms{clipped}")
    for name in ("schedule", "step, %", "ms", "/ without", "planned", "tail"):
        table.add_column(name, justify="right")
    for schedule in given.schedules:
        sizes = "--p", str(given.p), "--m", str(given.m), "--steps", str(given.steps)
        options = (*sizes, "--milliseconds", str(given.milliseconds), *["--clip"] * given.clip)
        without: list[float] = []
        for percent in (0.0, *given.percent):
            case = json.dumps([schedule, percent])
            found = run_ranks("host_step_emulated", *options, "--case", case)
            without = without or found
            over = [f"{now / then:.3f}" for now, then in zip(found[:2], without, strict=False)]
            row = (schedule, f"{percent:g}", f"{found[0] * 1e3:.0f}", *over, f"{found[2]}")
            table.add_row(*row)
        table.add_section()
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
