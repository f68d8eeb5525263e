"""What a solver gains over the best plan that the families of schedules have.

F, B, W of 30, 29 and 20, messages of 1, activations of 17 (16 after B), copies of 20 each way where
nothing else is said; limits as a share of what 1F1B keeps on its first rank. No device is needed.

    python examples/benchmarks/solver_gains.py --seconds 60
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import replace
from typing import NamedTuple

from lightning_pipeoffload.schedule import (
    Costs,
    PlanRequest,
    ScheduleError,
    build,
    check_schedule,
    make_plan,
    options,
    simulate,
)

COSTS = Costs(30.0, 29.0, 20.0, 1.0, 17.0, 16.0, 20.0, 20.0, copy_lanes=2)
UNEVEN = tuple(1.5 if stage == 3 else 1.0 for stage in range(8))
ONE_LONG_STAGE = replace(
    COSTS,
    forward=[30.0 * long for long in UNEVEN],
    backward_input=[29.0 * long for long in UNEVEN],
    backward_weight=[20.0 * long for long in UNEVEN],
)


class Setting(NamedTuple):
    """One row of the table."""

    name: str
    costs: Costs
    num_ranks: int
    num_microbatches: int
    share: float


ONE_LANE, SLOW = replace(COSTS, copy_lanes=1), replace(COSTS, offload=60.0, reload=60.0)
SETTINGS = [
    Setting("even", COSTS, 4, 8, 0.5),
    Setting("even", COSTS, 4, 8, 0.375),
    Setting("even", COSTS, 8, 16, 0.25),
    Setting("one lane", ONE_LANE, 4, 8, 0.5),
    Setting("one lane", ONE_LANE, 8, 16, 0.75),
    Setting("one lane", ONE_LANE, 8, 16, 0.5),
    Setting("one stage 1.5 times as long", ONE_LONG_STAGE, 8, 16, 0.5),
    Setting("one stage 1.5 times as long", ONE_LONG_STAGE, 8, 16, 0.25),
    Setting("copies of 60", SLOW, 4, 8, 0.5),
    Setting("copies of 60", SLOW, 8, 16, 0.5),
]


def best_family(setting: Setting, limit: float) -> tuple[str, float]:
    """Return the name of the fastest family within a limit, and its seconds."""
    wanted = options([setting.num_microbatches], num_chunks=1)
    request = PlanRequest(setting.num_ranks, wanted, lambda _: setting.costs, limit)
    best = make_plan(request).best
    assert best.makespan is not None
    return best.option.schedule, best.makespan


def solved(setting: Setting, limit: float, seconds: float) -> tuple[float, float]:
    """Return what the solver's plan takes, and what the solver took."""
    sizes = setting.num_ranks, setting.num_microbatches
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        plan = build(
            "optpipe",
            *sizes,
            costs=setting.costs,
            memory_limit=limit,
            solver_seconds=seconds,
            plan_cache=folder,
        )
    check_schedule(plan, setting.costs, limit)
    return simulate(plan, setting.costs).makespan, time.monotonic() - start


def main() -> None:
    """Print a line of the table for each setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    print(f"{os.cpu_count()} cores, {seconds:g} s for each\n")
    print("| setting | p, m | limit | best family | solver | gain | seconds |")
    print("|---|---|---|---|---|---|---|")
    for setting in SETTINGS:
        limit = setting.share * setting.num_ranks * 17.0
        try:
            name, before = best_family(setting, limit)
        except ScheduleError:
            name, before = "none", float("inf")
        after, took = solved(setting, limit, seconds)
        sizes = f"{setting.num_ranks}, {setting.num_microbatches}"
        family, gain = f"`{name}` {before:.0f}", f"{1 - after / before:.1%}"
        row = setting.name, sizes, f"{setting.share:g}", family, f"{after:.0f}", gain, f"{took:.0f}"
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
