"""Counts the buffers that messages over NCCL hold, without a GPU.

The executor and the transport of each rank run in the model of ``hangs.py``, whose hosts are so far
ahead of their devices that no message counts as sent: two training steps by the plan, then two
evaluations, each after one that runs one microbatch at a time::

    python -m examples.benchmarks.message_buffers [--ranks 8] [--microbatches 64] [--schedules zb_v]
"""

from __future__ import annotations

import argparse

from examples.benchmarks.hangs import AGAIN, EVALUATION, EVALUATION_AGAIN, PLAN, Variant
from lightning_pipeoffload.schedule import SCHEDULES, peak_message_memory

STEPS = {PLAN: "train", AGAIN: "train", EVALUATION: "evaluate", EVALUATION_AGAIN: "evaluate"}


def held(variant: Variant) -> list[int]:
    """Return the most buffers of a rank after each of these steps."""
    hosts = variant.enqueue()
    return [max(host.buffers[step] for host in hosts) for step in STEPS]


def planned(variant: Variant) -> int:
    """Return the most messages of a rank at a time by the plan."""
    plans = variant.plans()
    return int(max(peak_message_memory(plans[PLAN], lambda send: 1, plans[EVALUATION])))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--schedules", nargs="+", default=[*SCHEDULES])
    arguments = parser.parse_args()
    print("| schedule |", " | ".join(STEPS.values()), "| planned |")
    print("|---" * (2 + len(STEPS)) + "|")
    for name in arguments.schedules:
        variant = Variant(name, arguments.ranks, num_microbatches=arguments.microbatches)
        cells = " | ".join(map(str, [*held(variant), planned(variant)]))
        print(f"| {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
