"""A rank that fails or is killed wherever it is ends all."""

import pytest

from tests.support import failing_on_demand
from tests.support.forked_runs import run_forked
from tests.support.pairs import some


@pytest.mark.parametrize(("place", "rank"), some([("push", 1), ("gather", 1), ("barrier", 1)], 3))
def test_a_killed_rank_is_named(place, rank):
    run = run_forked(failing_on_demand.main, place, "kill", str(rank))
    assert run.status != 0
    because = f"global rank {rank}, which was killed by SIGKILL"
    assert run.lines == [f"[pipeoffload] global rank {1 - rank} stops because of {because}"]


def test_an_exception_in_a_push_names_the_place():
    run = run_forked(failing_on_demand.main, "push", "raise", "1")
    place = "the push of blocks.0 to rank 1"
    error = f"RuntimeError: on purpose (in {place})"
    assert run.lines == [
        f"[pipeoffload] global rank 1 failed in {place}",
        f"[pipeoffload] global rank 0 stops because of global rank 1: {error}",
    ]
