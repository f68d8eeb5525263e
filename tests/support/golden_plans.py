"""The figures of every schedule's plans, as ``tests/schedule/golden_plans.csv`` holds them.

python -m tests.support.golden_plans    # writes the table again: its differences are for review
"""

import csv
from itertools import product
from pathlib import Path

from lightning_pipeoffload.schedule import (
    FAMILIES,
    Costs,
    MemoryLimitError,
    Slices,
    build,
    lower,
    offload_activations,
    peak_memory,
    simulate,
    steady_period,
)

TABLE = Path(__file__).parents[1] / "schedule" / "golden_plans.csv"
COLUMNS = ("schedule", "p", "m", "costs", "limit", "offload", "period", "makespan", "peaks")
SIZES = [(2, 4), (4, 8), (8, 16), (8, 32)]
# Of the largest rank's peak without a limit, by the amount that is offloaded.
LIMITS = [("", "none"), ("3/4", "none"), ("", "half"), ("1/2", "auto")]
NUM_SLICES = 4  # of schedules that have slices of sequences

# The solver's plans depend on the machine's speed, so optpipe has no row.
Setting = tuple[str, int, int, str, str, str]
SETTINGS = [
    (name, p, m, costs, limit, offload)
    for name, (p, m), costs, (limit, offload) in product(
        FAMILIES, SIZES, ("unit", "uneven"), LIMITS
    )
    if offload == "none" or name not in ("po_h", "po_f")  # which offload by themselves
]


def is_quick(setting):
    """Return whether the default run compares this row."""
    name, p, *_ = setting
    return p < (4 if FAMILIES[name].takes_seconds else 8)


def row(setting):
    """Return a row of the table, as text; figures to six digits."""
    name, p, m, costs, limit, offload = setting
    seconds = costs_of(costs, (FAMILIES[name].num_chunks or 1) * p)
    cells = [name, str(p), str(m), costs, limit, offload]
    try:
        plan = lower(plan_of(name, (p, m), seconds, limit, offload))
    except MemoryLimitError:
        return [*cells, "", "", "limit too small"]
    timeline = simulate(plan, seconds)
    period = steady_period(plan, seconds, has_barrier=False)
    peaks = " ".join(f"{peak:.6g}" for peak in timeline.peak_memory)
    return [*cells, f"{period:.6g}", f"{timeline.makespan:.6g}", peaks]


def costs_of(kind, num_stages):
    """Return equal costs, or such as differ from stage to stage in everything."""
    if kind == "unit":
        return Costs(1, 1, 1, offload=0.7, reload=0.7)

    def spread(least, step, every):
        return [least + step * (stage % every) for stage in range(num_stages)]

    return Costs(
        forward=spread(1, 0.5, 3),
        backward_input=spread(1.3, 0.2, 2),
        backward_weight=spread(0.7, 0.1, 4),
        communication=0.1,
        activation=spread(1, 0.25, 2),
        weight_residue=0.5,
        weight_input=0.3,
        offload=0.7,
        reload=0.8,
        slices=Slices(
            (4, 3, 2, 1),
            quadratic_forward=0.3,
            quadratic_backward_input=spread(0.4, 0.1, 2),
            end_forward=[0] * (num_stages - 1) + [0.2],
            end_activation=[0] * (num_stages - 1) + [0.3],
            key_values=0.1,
        ),
    )


def plan_of(name, size, costs, limit, offload):
    """Build, and offload, under a share of what the schedule needs without a limit."""
    options = {"num_sequence_slices": NUM_SLICES} if FAMILIES[name].can_slice else {}
    schedule = build(name, *size, costs=costs, **options)
    if limit:
        part, whole = map(int, limit.split("/"))
        most = max(peak_memory(schedule, costs)) * part / whole
        if offload == "none":
            return build(name, *size, costs=costs, memory_limit=most, **options)
        return offload_activations(schedule, costs, offload, most)[0]
    return schedule if offload == "none" else offload_activations(schedule, costs, offload)[0]


def write():
    """Write the table."""
    with TABLE.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        rows.writerows(map(row, SETTINGS))


def read():
    """Read the table: a row by its setting."""
    with TABLE.open(newline="") as file:
        _, *rows = csv.reader(file)
    return {(found[0], int(found[1]), int(found[2]), *found[3:6]): found for found in rows}


if __name__ == "__main__":
    write()
