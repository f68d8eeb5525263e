"""`python -m tests.generated fuzz [SECONDS [FIRST]]`, `... seed NUMBER`, `... shrink FILE`."""

import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.generated.choices import draw, plain
from tests.generated.program_source import program_source
from tests.generated.shrink import shrink
from tests.generated.verdict import Pools, choices_of, judge_choices
from tests.support.caches import begin_session


def fuzz(get_pool, seconds="600", first=None):
    """Judge programs of new seeds for so long; print those that fail, made small."""
    end, outcomes = time.monotonic() + float(seconds), Counter()
    seed = int(first) if first else int(time.time())
    while time.monotonic() < end:
        _judge_seed(get_pool, seed, outcomes)
        seed += 1
    print(dict(outcomes))
    return all(outcome in ("equal", "refused") for outcome in outcomes)


def _judge_seed(get_pool, seed, outcomes):
    started = time.monotonic()
    verdict = judge_choices(draw(seed), get_pool)
    outcomes[verdict.outcome] += 1
    shown = verdict.lines[-1][:160] if verdict.lines else ""
    print(
        f"seed {seed}: {verdict.outcome} ({time.monotonic() - started:.1f} s) {shown}", flush=True
    )
    if not verdict.is_right:
        _report(get_pool, draw(seed), f"seed_{seed}.py")


def shrink_file(get_pool, path):
    """Make the program of a file small."""
    return _report(get_pool, choices_of(path), f"{Path(path).stem}_small.py")


def judge_seed(get_pool, seed):
    """Judge the program of a seed, and make it small if it fails."""
    outcomes = Counter()
    _judge_seed(get_pool, int(seed), outcomes)
    return {*outcomes} <= {"equal", "refused"}


def _report(get_pool, chosen, name):
    small, verdict = shrink(chosen, lambda tried: judge_choices(tried, get_pool))
    path = Path(tempfile.gettempdir(), name)
    path.write_text(program_source(small, plain()))
    different = {key: value for key, value in small.items() if value != plain()[key]}
    print(f"  {path}: {verdict.outcome} with {different}")
    lines = verdict.lines[:8] if verdict.outcome == "wrong" else verdict.lines[-20:]
    print(*(f"    {line[:200]}" for line in lines), sep="\n", flush=True)
    return verdict.is_right


def _main():
    name, *arguments = sys.argv[1:]
    caches, pools = begin_session(), Pools()
    commands = {"fuzz": fuzz, "seed": judge_seed, "shrink": shrink_file}
    try:
        is_right = commands[name](pools.get, *arguments)
    finally:
        pools.close()
        shutil.rmtree(caches, ignore_errors=True)
    sys.exit(not is_right)


if __name__ == "__main__":
    _main()
