"""How a rank that has failed leaves, seen from inside its process."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from lightning_pipeoffload import failure
from lightning_pipeoffload.launched import LaunchedProcesses


def test_who_has_told_waits_for_a_rank_that_stands_still_for_a_while(monkeypatch):
    store, seconds = HashStore(), []

    def sleep(pause):
        seconds.append(pause)
        if sum(seconds) > 20:
            store.set("seen/1", "")

    monkeypatch.setattr(failure, "_exit_soon", lambda *_: None)
    board = failure.FailureBoard(0, 2, LaunchedProcesses(0, 0, ()))
    board.connect(store)
    monkeypatch.setattr(failure.time, "sleep", sleep)
    board.report(KeyError("in a hook"), "", 1)
    assert 20 < sum(seconds) < 21
    assert (
        failure.Failure.decode(store.get("failure")).cause == "global rank 0: KeyError: 'in a hook'"
    )


@pytest.mark.parametrize(("num_silent", "waits"), [(1, False), (2, True)])
def test_a_rank_that_was_killed_is_not_waited_for(monkeypatch, num_silent, waits):
    store, seconds = HashStore(), []
    for rank in range(1 + num_silent, 4):
        store.set(f"seen/{rank}", "")
    monkeypatch.setattr(failure.os, "_exit", lambda status: None)
    board = failure.FailureBoard(0, 4, LaunchedProcesses(0, 0, ()))
    board.connect(store)
    monkeypatch.setattr(failure.time, "sleep", seconds.append)
    board.stop_because_of_others("Connection closed by peer")
    heard = sum(seconds) - failure._CAUSE_SECONDS
    assert heard == pytest.approx(failure._HEARD_SECONDS if waits else 0)
