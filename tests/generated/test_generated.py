"""Generated programs compared with one device; `make fuzz SECONDS=600` runs others.

`python -m tests.generated seed NUMBER` makes a failing seed's program small and writes its file.
"""

import os
import subprocess
import sys

import pytest

from tests.generated.choices import draw, plain
from tests.generated.program_source import program_source
from tests.generated.shrink import shrink
from tests.generated.verdict import Verdict, judge_choices

NUM_PROGRAMS = 200
FAILED_ONCE = (780417,)  # an evaluation that cannot be cut, before the blocks are known


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(NUM_PROGRAMS), *FAILED_ONCE])
def test_a_program_runs_over_its_ranks_as_on_one_device(pools, seed):
    verdict = judge_choices(draw(seed), pools)
    text = "\n".join(verdict.lines[-30:])
    assert verdict.is_right, f"{text}\n{program_source(draw(seed), plain(), f', seed {seed}')}"


def test_the_shrinker_keeps_what_fails():
    def judge(chosen):
        is_wrong = chosen["call"] == "gates" and chosen["clip"] == "norm"
        return Verdict("wrong" if is_wrong else "equal")

    seed = next(s for s in range(10000) if not judge(draw(s)).is_right)
    chosen, verdict = shrink(draw(seed), judge)
    different = {name for name, value in chosen.items() if value != plain()[name]}
    assert (different, verdict.outcome) == ({"call", "clip"}, "wrong")


@pytest.mark.slow
def test_the_command_judges_a_seed_outside_of_pytest():
    outside = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
    command = [sys.executable, "-m", "tests.generated", "seed", "0"]
    run = subprocess.run(command, env=outside, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
