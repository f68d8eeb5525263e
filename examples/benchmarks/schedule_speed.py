"""How long it takes to build and to simulate every schedule for a large pipeline, in CPU seconds.

    python examples/benchmarks/schedule_speed.py

With 32 ranks, 256 microbatches and two stages per rank, where a schedule can have them, a plan has
about 50,000 actions. The searched schedules are built with times that no construction suits, those
of the 28.3B model of "Zero Bubble Pipeline Parallelism" (table 8).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_pipeoffload.schedule import SCHEDULES, Costs, ScheduleError, build, simulate

SEARCHED = {"zb", "zb_1p", "zb_2p", "zb_v", "1f1b_v", "v_min", "v_half", "v"}
PROFILED = Costs(9.447, 9.644, 7.193, communication=0.887)
COPYING = Costs(1, 1, 1, offload=1, reload=1)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return what ``call`` returns, and the CPU seconds it took."""
    start = time.process_time()
    value = call()
    return value, time.process_time() - start


def build_large(name: str, p: int, m: int) -> Any:
    """Build with two stages per rank, or as many as the schedule has."""
    costs = PROFILED if name in SEARCHED else None
    try:
        return build(name, num_ranks=p, num_microbatches=m, num_chunks=2, costs=costs)
    except ScheduleError:
        return build(name, num_ranks=p, num_microbatches=m, costs=costs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--p", type=int, default=32, help="ranks")
    parser.add_argument("--m", type=int, default=256, help="microbatches")
    arguments = parser.parse_args()
    table = Table("schedule", "costs", title=f"p={arguments.p}, m={arguments.m}: CPU seconds")
    for name in ("actions", "build", "simulate"):
        table.add_column(name, justify="right")
    for name in SCHEDULES:
        schedule, building = timed(partial(build_large, name, arguments.p, arguments.m))
        _, simulating = timed(partial(simulate, schedule, COPYING))
        kind = "profiled" if name in SEARCHED else "equal"
        num_actions = sum(map(len, schedule))
        table.add_row(name, kind, f"{num_actions}", f"{building:.2f}", f"{simulating:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
