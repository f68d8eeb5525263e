"""What ``schedule="auto"`` chooses in 12 settings, compared with the best that any hand finds.

    python -m examples.benchmarks.auto_choice

Stages take 30 of F, 29 of B and 20 of W, even or with the one in the middle half as long again;
links are fast or slow; limits loose, tight, or none. By hand every family is built for the limit
and with copies under it, one by one, without the shortcuts of the choice. All times are the
simulator's. ``--wall`` instead measures Trainers: see auto_wall.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import product

from lightning_pipeoffload.schedule import (
    Candidate,
    Costs,
    PlanOption,
    PlanRequest,
    Schedule,
    ScheduleError,
    build,
    make_plan,
    offload_activations,
    options,
    simulate,
    split_fused_backward,
)

ACTIVATION, RESIDUE = 17, 16
SLOW_STAGE = 1.5
LINKS = {"fast": (20, 2), "slow": (60, 1)}  # seconds of a copy, lanes
SHARES = {"none": None, "loose": 0.75, "tight": 0.4}  # of what 1F1B keeps


@dataclass(frozen=True)
class Setting:
    """One line of the table."""

    num_ranks: int
    num_microbatches: int
    is_even: bool
    link: str
    limit: str

    @property
    def memory_limit(self) -> float | None:
        """The most memory of a rank."""
        share = SHARES[self.limit]
        return None if share is None else share * self.num_ranks * ACTIVATION

    def costs_of(self, option: PlanOption) -> Costs:
        """Return what stages cost: each rank's part in as many, the middle one longer."""
        num_stages = self.num_ranks * option.num_chunks
        place = num_stages // 2
        longer = [1.0 if self.is_even or s != place else SLOW_STAGE for s in range(num_stages)]
        seconds, lanes = LINKS[self.link]
        share = 1 / option.num_chunks
        forward, backward, weights = ([n * share * x for x in longer] for n in (30, 29, 20))
        return Costs(
            *(forward, backward, weights, 1.0),
            activation=ACTIVATION * share,
            weight_residue=RESIDUE * share,
            offload=seconds * share,
            reload=seconds * share,
            copy_lanes=lanes,
        )

    def choose(self) -> Candidate:
        """Return what ``auto`` takes."""
        wanted = options([self.num_microbatches])
        request = PlanRequest(self.num_ranks, wanted, self.costs_of, self.memory_limit)
        return make_plan(request).best

    def by_hand(self) -> tuple[float, str]:
        """Return the best time of all plans, and the plan's name."""
        return min(self._plans())

    def _plans(self) -> Iterator[tuple[float, str]]:
        wanted = options([self.num_microbatches])
        found = plans_by_hand(wanted, self.num_ranks, self.costs_of, self.memory_limit)
        for option, plan, copies in found:
            seconds = simulate(split_fused_backward(plan), self.costs_of(option)).makespan
            yield seconds, f"{option.schedule} x{option.num_chunks}{'+auto' * copies}"


def plans_by_hand(
    wanted: Iterable[PlanOption],
    num_ranks: int,
    costs_of: Callable[[PlanOption], Costs],
    memory_limit: float | None,
) -> Iterator[tuple[PlanOption, Schedule, bool]]:
    """Yield each option's plans that keep a limit, without copies and with them."""
    for option in wanted:
        sizes = num_ranks, option.num_microbatches, option.num_chunks, costs_of(option)
        for copies in (False, True) if memory_limit else (False,):
            try:
                plan = build(option.schedule, *sizes, None if copies else memory_limit)
                if copies:
                    plan, _ = offload_activations(plan, costs_of(option), "auto", memory_limit)
            except ScheduleError:
                continue
            yield option, plan, copies


def rows(num_ranks: int, num_microbatches: int) -> Iterator[list[str]]:
    """Yield the cells of each line."""
    for is_even, link, limit in product((True, False), LINKS, SHARES):
        setting = Setting(num_ranks, num_microbatches, is_even, link, limit)
        started = time.process_time()
        best = setting.choose()
        took = time.process_time() - started
        seconds, name = setting.by_hand()
        assert best.makespan is not None
        chosen = f"{best.option.schedule} x{best.option.num_chunks}"
        yield [
            "even" if is_even else "uneven",
            link,
            limit,
            chosen + (f"+{best.offload}" if best.offload == "auto" else ""),
            f"{best.makespan:.1f}",
            name,
            f"{seconds:.1f}",
            f"{best.makespan / seconds:.4f}",
            f"{took:.1f}",
        ]


HEADER = ["stages", "links", "limit", "auto", "time", "best hand", "time", "ratio", "CPU s"]


def main() -> None:
    if "--wall" in sys.argv:
        wall = import_module("examples.benchmarks.auto_wall")
        wall.main([argument for argument in sys.argv[1:] if argument != "--wall"])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--p", type=int, default=4)
    parser.add_argument("--m", type=int, default=8)
    sizes = parser.parse_args()
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    for row in rows(sizes.p, sizes.m):
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
