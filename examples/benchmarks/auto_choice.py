"""What ``schedule="auto"`` chooses in 12 settings, beside the best that any hand finds.

    python -m examples.benchmarks.auto_choice

Stages take 30 of F, 29 of B and 20 of W, even or with the one in the middle half as long again;
links are fast or slow; limits loose, tight, or none. By hand every family is built for the limit
and with copies under it, one by one, without the shortcuts of the choice. All times are the
simulator's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from lightning_pipeoffload.schedule import (
    Costs,
    Schedule,
    ScheduleError,
    build,
    offload_activations,
    simulate,
    split_fused_backward,
)
from lightning_pipeoffload.schedule.candidates import Candidate, Option, options
from lightning_pipeoffload.schedule.evaluation import Limits, evaluate

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

    def costs_of(self, option: Option) -> Costs:
        """Return what stages cost: each rank's part in as many, the middle one longer."""
        num_stages = self.num_ranks * option.num_chunks
        place = num_stages // 2
        longer = [1.0 if self.is_even or s != place else SLOW_STAGE for s in range(num_stages)]
        seconds, lanes = LINKS[self.link]
        share = 1 / option.num_chunks
        times = ([n * share * x for x in longer] for n in (30, 29, 20))
        kept = {"activation": ACTIVATION * share, "weight_residue": RESIDUE * share}
        copies = {"offload": seconds * share, "reload": seconds * share, "copy_lanes": lanes}
        return Costs(*times, 1.0, **kept, **copies)

    def choose(self) -> Candidate:
        """Return what ``auto`` takes."""
        wanted = options([self.num_microbatches])
        return evaluate(wanted, self.num_ranks, self.costs_of, Limits(self.memory_limit)).best

    def by_hand(self) -> tuple[float, str]:
        """Return the best time of all plans, and the plan's name."""
        return min(self._plans())

    def _plans(self) -> Iterator[tuple[float, str]]:
        for option in options([self.num_microbatches]):
            costs = self.costs_of(option)
            for copies in (False, True) if self.memory_limit else (False,):
                try:
                    plan = self._plan(option, costs, copies)
                except ScheduleError:
                    continue
                seconds = simulate(split_fused_backward(plan), costs).makespan
                yield seconds, f"{option.schedule} x{option.num_chunks}{'+auto' * copies}"

    def _plan(self, option: Option, costs: Costs, copies: bool) -> Schedule:
        sizes = self.num_ranks, self.num_microbatches, option.num_chunks, costs
        if not copies:
            return build(option.schedule, *sizes, self.memory_limit)
        return offload_activations(
            build(option.schedule, *sizes), costs, "auto", self.memory_limit
        )[0]


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
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--p", type=int, default=4)
    parser.add_argument("--m", type=int, default=8)
    sizes = parser.parse_args()
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    for row in rows(sizes.p, sizes.m):
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
