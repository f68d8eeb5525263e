"""Compares the working tree with a commit: training to the bit, and the figures of benchmarks.

    python -m tests.support.compare_with main
    python -m tests.support.compare_with HEAD~3 --turns 5 --only host_time schedule_speed

The commit is checked out in a temporary worktree. Both trees train by a ``step_digests`` of their
own; then they run each benchmark in turns, and figures whose median changed by more than 3 % are
shown. Times are only comparable on a machine that does nothing else.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
BOUND = 0.03
EMULATED = ["examples.benchmarks.emulated", "--p", "4", "--m", "8", "--runs", "3"]
BENCHMARKS = {
    "emulated": [*EMULATED, "--schedules", "1f1b", "zb_h1"],
    "period": [*EMULATED, "--period", "--steps", "10", "--alone"],
    "schedule_speed": ["examples.benchmarks.schedule_speed", "--p", "16", "--m", "128"],
    "host_time": ["examples.benchmarks.host_time", "--p", "4", "--m", "8"],
    "weight_split": ["examples.benchmarks.weight_split", "--widths", "256"],
}

Figures = dict[str, float]


@contextmanager
def worktree(commit):
    """Check a commit out, for as long as it is needed."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "base"
        subprocess.run([*git, "add", "--quiet", "--detach", str(path), commit], check=True)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


def run(tree, module):
    """Run a module of a tree; return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", *module]
    done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode} in {tree}")
    return done.stdout


def digests(tree):
    """Return the digest of each training."""
    printed = run(tree, ["tests.support.step_digests"]).splitlines()
    return dict(json.loads(line) for line in printed if line.startswith('["'))  # fits print tables


def differences(base, mine):
    """Return a line for each training that is not the same, or is in one tree only."""
    names = sorted(base.keys() | mine.keys())
    found = [(name, base.get(name, "none"), mine.get(name, "none")) for name in names]
    return [f"{name}: {before} before, {now} now" for name, before, now in found if before != now]


def figures(printed):
    """Read the numbers in the tables that rich has drawn, by row and column."""
    heads = []
    found = {}
    for line in printed.splitlines():
        if "┃" in line:  # a head may take several lines
            cells = [cell.strip() for cell in line.split("┃")[1:-1]]
            heads = [" ".join(filter(None, pair)) for pair in zip_longest(heads, cells)]
        elif "│" in line:
            cells = [cell.strip() for cell in line.split("│")[1:-1]]
            row = " ".join(cell for cell in cells if cell and not _is_number(cell))
            for head, cell in zip(heads, cells, strict=True):
                if _is_number(cell):
                    name = f"{row}, {head}"
                    found[f"{name} ({len(found)})" if name in found else name] = float(cell)
    return found


def _is_number(cell):
    return cell.replace(".", "", 1).isdigit()


def changed(base, mine):
    """Return a line for each figure whose median over the turns differs by more than the bound."""
    lines = []
    for name in base[0].keys() & mine[0].keys():
        before, now = (median(turn.get(name, 0.0) for turn in turns) for turns in (base, mine))
        if abs(now - before) > BOUND * before:
            lines.append(f"{name}: {before:g} -> {now:g} ({now / (before or 1):.3f})")
    return sorted(lines)


def main(line=None):
    """Compare, and return 1 where training is not the same to the bit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("base", help="a commit")
    parser.add_argument("--only", nargs="+", choices=["bits", *BENCHMARKS], help="default: all")
    parser.add_argument("--turns", type=int, default=3, help="of each benchmark in each tree")
    given = parser.parse_args(line)
    wanted = given.only or ["bits", *BENCHMARKS]
    different = []
    with worktree(given.base) as base:
        if "bits" in wanted:
            before = digests(base)
            different = differences(before, digests(ROOT))
            _say(f"bits: {len(before)} trainings, {len(different)} not the same", different)
        for name in (name for name in BENCHMARKS if name in wanted):
            turns = [
                [figures(run(tree, BENCHMARKS[name])) for tree in (base, ROOT)]
                for _ in range(given.turns)
            ]
            lines = changed(*zip(*turns, strict=True))
            _say(f"{name}: {len(turns[0][0])} figures, {len(lines)} beyond {BOUND:.0%}", lines)
    return int(bool(different))


def _say(head, lines):
    sys.stdout.write("\n    ".join([head, *lines]) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
