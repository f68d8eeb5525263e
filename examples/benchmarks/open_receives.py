"""How many kernels of messages spin during what is computed, on several GPUs without one.

A receive over NCCL is a kernel that spins from where it is posted until its message is sent, a send
until its receive is posted. Each rank's compute stream runs its actions of a plan, by costs of four
layers of Llama 7B on an H200 that vary by a tenth from one action to the next; estimates of
operations say when receives are posted::

    python -m examples.benchmarks.open_receives [--ranks 8] [--microbatches 32] [--schedules zb_v]

"Early" is every receive as soon as its message may come. Kernels are the mean during computation.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from lightning_pipeoffload.schedule import (
    COMPUTE,
    SENDS,
    Action,
    Costs,
    OpenReceives,
    Schedule,
    build,
    lower,
    receives_to_post,
    recv_before,
    recv_of,
    send_of,
)

SECONDS = {"F": 0.0170, "B": 0.0238, "W": 0.0121}  # of F, B and W of a rank's layers
ESTIMATE = Costs(1.0, 1.1, 0.95)
SCHEDULES = ["1f1b", "zb_h1", "zb_2p", "interleaved_1f1b", "zb_v", "v_half"]

Expected = Mapping[Action, Any] | None


class Operation(NamedTuple):
    """What a host enqueues: post or take a receive, compute an action, send."""

    what: str
    action: Action


def enqueued(plan: Schedule, rank: int, expected: Expected) -> Iterator[Operation]:
    """Yield what a rank's host enqueues, in its order, as the executor does."""
    posted: list[Action] = []
    receives = OpenReceives(plan, rank, lambda receive, source: posted.append(receive), expected)
    receives.queue_receives(plan[rank])
    taken: set[Action] = set()

    def post() -> Iterator[Operation]:
        yield from (Operation("post", receive) for receive in posted)
        posted.clear()

    for action in plan[rank]:
        needed = recv_before(plan, action)
        if action.kind in SENDS:
            yield Operation("send", recv_of(action))
            receives.count_send()
        elif action.kind in COMPUTE:
            receives.post_expected_receives(action)
            yield from post()
            for receive in (
                receives.pop_receives_up_to(needed) if needed and needed not in taken else ()
            ):
                yield from post()
                taken.add(receive)
                yield Operation("take", receive)
            yield from post()
            yield Operation("compute", action)
        else:
            receives.mark_reached(action)
        yield from post()


class Devices:
    """The compute streams of all ranks and the messages between them."""

    def __init__(
        self, plan: Schedule, seconds: Callable[[Action], float], transfer: float, early: bool
    ) -> None:
        self._plan, self._seconds, self._transfer = plan, seconds, transfer
        self._left = [
            [*enqueued(plan, rank, None if early else receives_to_post(plan, rank, ESTIMATE))][::-1]
            for rank in range(plan.num_ranks)
        ]
        self._now = [0.0] * plan.num_ranks
        self._ready: dict[tuple[str, Action], float] = {}
        self._end: dict[Action, float] = {}
        self._edge_end: defaultdict[tuple[int, int], float] = defaultdict(float)
        self._changes: list[list[tuple[float, int, int]]] = [[] for _ in self._now]

    def run(self) -> tuple[float, float, float]:
        """Return the seconds of a step, the mean of kernels, and the share of time with two."""
        while any(self._left):
            for rank, left in enumerate(self._left):
                while left and self._advance(rank, *left[-1]):
                    left.pop()
        by_number: defaultdict[int, float] = defaultdict(float)
        for changes in self._changes:
            computing = kernels = 0
            for (time, compute, kernel), after in pairwise(sorted(changes)):
                computing, kernels = computing + compute, kernels + kernel
                by_number[kernels] += (after[0] - time) * computing
        total = sum(by_number.values())
        mean = sum(number * time for number, time in by_number.items()) / total
        return max(self._now), mean, sum(t for n, t in by_number.items() if n > 1) / total

    def _advance(self, rank: int, what: str, action: Action) -> bool:
        if what == "compute":
            self._span(rank, self._now[rank], self._now[rank] + self._seconds(action), (1, 0))
            self._now[rank] += self._seconds(action)
        elif what == "take":
            if action not in self._end:
                return False
            self._now[rank] = max(self._now[rank], self._end[action])
        else:
            self._ready[what, action] = self._now[rank]
            if ("post", action) in self._ready and ("send", action) in self._ready:
                self._meet(action)
        return True

    def _meet(self, receive: Action) -> None:
        """Let a message's two kernels run; those of an edge run one after the other."""
        edge = self._plan.rank_of(send_of(receive).stage), self._plan.rank_of(receive.stage)
        since = {
            rank: max(self._ready[what, receive], self._edge_end[edge])
            for what, rank in zip(("send", "post"), edge, strict=True)
        }
        self._end[receive] = self._edge_end[edge] = max(since.values()) + self._transfer
        for rank, start in since.items():
            self._span(rank, start, self._end[receive], (0, 1))

    def _span(self, rank: int, start: float, end: float, of: tuple[int, int]) -> None:
        self._changes[rank] += [(start, *of), (end, -of[0], -of[1])]


def row(name: str, num_ranks: int, num_microbatches: int, transfer: float) -> str:
    """Return a schedule's row of the table."""
    plan = lower(build(name, num_ranks, num_microbatches))
    rng, found = random.Random(0), {}

    def seconds(action: Action) -> float:
        if action not in found:
            of = sum(SECONDS[kind] for kind in action.kind.value) / plan.num_chunks
            found[action] = of * rng.uniform(0.9, 1.1)
        return found[action]

    early = Devices(plan, seconds, transfer, early=True).run()
    late = Devices(plan, seconds, transfer, early=False).run()
    cells = early[1], late[1], early[2], late[2], late[0] / early[0]
    return (
        f"| {name} | {transfer * 1e3:g} | "
        + " | ".join(f"{c:.2f}" for c in cells[:4])
        + (f" | {cells[4]:.4f} |")
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES)
    arguments = parser.parse_args()
    print(
        "| schedule | transfer, ms | kernels, early | planned | two or more, early | planned | "
        "step, planned / early |"
    )
    print("|---" * 7 + "|")
    for name in arguments.schedules:
        for transfer in (0.0004, 0.0017):
            print(row(name, arguments.ranks, arguments.microbatches, transfer), flush=True)


if __name__ == "__main__":
    main()
