"""How a rank that has failed leaves, seen from inside its process."""

from __future__ import annotations

import threading

from torch.distributed import HashStore  # type: ignore[attr-defined]

from lightning_pipeoffload import failure
from lightning_pipeoffload.launched import LaunchedProcesses


def test_who_has_told_waits_for_a_rank_that_stands_still_for_a_while(monkeypatch):
    monkeypatch.setattr(failure, "_exit_soon", lambda *_: None)
    store = HashStore()
    board = failure.FailureBoard(0, 2, LaunchedProcesses(0, 0, ()))
    board.connect(store)
    late = threading.Timer(8.0, lambda: store.set("seen/1", ""))
    late.start()
    board.report(KeyError("in a hook"), "", 1)
    assert store.check(["seen/1"])
    assert (
        failure.Failure.decode(store.get("failure")).cause == "global rank 0: KeyError: 'in a hook'"
    )
