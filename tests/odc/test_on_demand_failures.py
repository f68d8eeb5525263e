"""A rank that fails or is killed wherever it is ends all, and leaves no shared memory."""

from pathlib import Path

import pytest

from lightning_pipeoffload.odc.shared_bytes import remove_left_files
from tests.support import failing_on_demand
from tests.support.forked_runs import run_forked
from tests.support.pairs import some


def left_files():
    return list(Path("/dev/shm").glob("pipeoffload-odc-*"))


@pytest.mark.parametrize(("place", "rank"), some([("push", 1), ("gather", 1), ("barrier", 1)], 3))
def test_a_killed_rank_is_named(place, rank):
    run = run_forked(failing_on_demand.main, place, "kill", str(rank))
    assert run.status != 0
    because = f"global rank {rank}, which was killed by SIGKILL"
    assert run.lines == [f"[pipeoffload] global rank {1 - rank} stops because of {because}"]
    assert not left_files()


def test_an_exception_in_a_push_names_the_place():
    run = run_forked(failing_on_demand.main, "push", "raise", "1")
    place = "the push of blocks.0 to rank 1"
    error = f"RuntimeError: on purpose (in {place})"
    assert run.lines == [
        f"[pipeoffload] global rank 1 failed in {place}",
        f"[pipeoffload] global rank 0 stops because of global rank 1: {error}",
    ]


def test_what_a_kill_of_all_leaves_is_removed_at_the_next_start():
    run_forked(failing_on_demand.main, "making", "kill_all", "0")
    assert left_files()
    remove_left_files()
    assert not left_files()
