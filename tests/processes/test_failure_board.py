"""How a rank that has failed leaves, seen from inside its process."""

import threading
from datetime import timedelta
from queue import Queue
from unittest.mock import Mock, call

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from lightning_pipeoffload.processes import failure, failure_board
from lightning_pipeoffload.processes.failure import Failure
from lightning_pipeoffload.processes.launcher import LaunchedProcesses


def test_the_store_stays_for_a_rank_that_stands_still_for_a_while(monkeypatch):
    store, seconds = HashStore(), []
    store.set("seen/1", "")  # it still waits for others, and reads the store

    def sleep(pause):
        seconds.append(pause)
        if sum(seconds) > 20:
            store.set("done/1", "")

    monkeypatch.setattr(failure_board, "exit_after_delay", lambda *_: None)
    board = failure_board.FailureBoard(0, 2, LaunchedProcesses(0, 0, ()))
    board.connect(store)
    monkeypatch.setattr(failure.time, "sleep", sleep)
    board.report(KeyError("in a hook"), "", 1)
    assert 20 < sum(seconds) < 21
    assert Failure.decode(store.get("failure")).cause == "global rank 0: KeyError: 'in a hook'"


@pytest.mark.parametrize("is_at_fault", [True, False])
def test_a_rank_that_is_done_reads_the_store_no_more(monkeypatch, is_at_fault):
    store = Mock(wraps=HashStore())
    store.set("seen/0", "")
    for name in ("exit_after_delay", "os"):
        monkeypatch.setattr(failure_board, name, Mock())
    board = failure_board.FailureBoard(1, 2, LaunchedProcesses(1, 1, ()))
    board.connect(store)
    if is_at_fault:
        board.report(SystemExit(1), "", 1)
    else:
        store.set("failure", Failure("global rank 0: said so").encode())
        board.exit_for_lost_rank("Connection closed by peer")
    assert store.method_calls[-1] == call.set("done/1", "")


@pytest.mark.parametrize(
    ("present", "waits", "cause"),
    [
        ([], False, "global ranks 1, 2, which are gone"),
        ([2], True, "global rank 1, which is gone"),
        ([1, 2], True, "Connection closed by peer"),
    ],
)
def test_a_rank_that_shows_no_sign_of_life_is_blamed_and_not_waited_for(
    monkeypatch, present, waits, cause
):
    store, seconds = HashStore(), []
    store.set("done/3", "")
    for rank in (*present, 3):
        store.set(f"present/{rank}", "")
    monkeypatch.setattr(failure_board.os, "_exit", lambda status: None)
    board = failure_board.FailureBoard(0, 4, LaunchedProcesses(0, 0, ()))
    board.connect(store)
    monkeypatch.setattr(failure.time, "sleep", seconds.append)
    board.exit_for_lost_rank("Connection closed by peer")
    assert Failure.decode(store.get("failure")).cause == cause
    heard = sum(seconds) - (failure_board._CAUSE_SECONDS if len(present) == 2 else 1.0)
    assert heard == pytest.approx(failure_board._SEEN_SECONDS if waits else 0, abs=0.3)


@pytest.mark.parametrize(
    ("others", "goes_on"),
    [
        ({1: "raised/", 2: "raised/"}, True),
        ({1: "raised/", 2: "seen/"}, False),
        ({1: "raised/other ", 2: "raised/"}, False),
    ],
)
def test_a_rank_goes_on_if_all_have_raised_the_same(monkeypatch, others, goes_on):
    store, seconds = HashStore(), []
    monkeypatch.setattr(failure_board, "exit_after_delay", lambda *_: None)
    monkeypatch.setattr(failure.time, "sleep", seconds.append)
    for rank, key in others.items():
        kind, _, other = key.partition("/")
        store.set(f"{kind}/{rank}", other + "ValueError: <object at 0x>")
        store.set(f"seen/{rank}", "")
        store.set(f"done/{rank}", "")
    board = failure_board.FailureBoard(0, 3, LaunchedProcesses(0, 0, ()))
    board.connect(store)
    assert board.report(ValueError("<object at 0x7f01>"), "", 1) == goes_on
    assert sum(seconds) < 1


def test_a_rank_that_raises_and_goes_on_between_two_requests_has_raised(monkeypatch):
    """It writes both while this rank, on a busy machine, stands between two of its requests."""
    plain = HashStore()

    def check(keys):
        found = plain.check(keys)
        if keys[0] in ("raised/1", "seen/1"):
            for key in ("raised/1", "seen/1", "done/1"):
                plain.set(key, "ValueError: alike")
        return found

    store = Mock(wraps=plain, check=check)
    monkeypatch.setattr(failure_board, "exit_after_delay", lambda *_: None)
    monkeypatch.setattr(failure.time, "sleep", lambda seconds: None)
    board = failure_board.FailureBoard(0, 2, LaunchedProcesses(0, 0, ()))
    board.connect(store)
    assert board.report(ValueError("alike"), "", 1)


@pytest.mark.parametrize("decided", [True, False])
def test_the_first_rank_to_know_decides_for_all(monkeypatch, decided):
    """One has given up waiting for this one, or has seen that all have raised the same."""
    store = HashStore()
    monkeypatch.setattr(failure_board, "exit_after_delay", lambda *_: None)
    for key, value in {"raised": "ValueError: alike", "seen": "", "done": ""}.items():
        store.set(f"{key}/1", value)
    store.set("alike", f"{decided:d}")
    board = failure_board.FailureBoard(0, 2, LaunchedProcesses(0, 0, ()))
    board.connect(store)
    assert board.report(ValueError("alike"), "", 1) == decided


def halt(*_):
    """Stay for ever: a thread that went on after a test would end pytest's own process."""
    threading.Event().wait()


@pytest.fixture(autouse=True)
def ending_boards(monkeypatch):
    """End the boards of a test: where ``halt`` holds one thread, another ends pytest's process.

    It would do so half an hour later, in a test that has nothing to do with it.
    """
    boards, make = [], failure_board.FailureBoard.__init__

    def make_known(board, *args):
        boards.append(board)
        make(board, *args)

    monkeypatch.setattr(failure_board.FailureBoard, "__init__", make_known)
    yield
    for board in boards:
        board._is_over.set()


@pytest.fixture
def ended(monkeypatch):
    """The status with which a thread ends the process, which stays."""
    statuses = Queue()
    monkeypatch.setattr(failure_board.os, "_exit", lambda status: statuses.put(status) or halt())
    return statuses


def test_a_store_that_does_not_answer_ends_the_process(monkeypatch, ended):
    monkeypatch.setattr(failure_board, "_LAST_POLL_SECONDS", 0)
    board = failure_board.FailureBoard(1, 2, LaunchedProcesses(1, 1, ()), timedelta(seconds=0.5))
    silent = Mock(check=halt)
    board.connect(silent)
    assert ended.get(timeout=1000) == 1
    board.stop()


@pytest.mark.parametrize("end", [lambda b: b.stop(), lambda b: b.report(SystemExit(1), "", 1)])
def test_no_thread_is_within_a_call_of_the_store_once_it_is_over(monkeypatch, end):
    monkeypatch.setattr(failure_board, "exit_after_delay", lambda *_: None)
    monkeypatch.setattr(failure_board, "_LAST_POLL_SECONDS", 1000)
    is_called, is_waited_for = threading.Event(), threading.Event()
    within = []

    def look(store):
        within.append(store)
        is_called.set()
        is_waited_for.wait(1000)
        within.pop()

    board = failure_board.FailureBoard(0, 1, LaunchedProcesses(0, 0, ()))
    board.add_poll(look)
    board.connect(HashStore())
    assert is_called.wait(1000)
    join = board._thread.join
    board._thread.join = lambda *timeout: is_waited_for.set() or join(*timeout)
    end(board)
    assert not within


def test_a_thread_that_dies_ends_the_process(ended):
    store = HashStore()
    board = failure_board.FailureBoard(1, 2, LaunchedProcesses(1, 1, ()))
    board.add_poll(lambda store: store.nothing_like_this())
    board.connect(store)
    assert ended.get(timeout=1000) == 1
    assert b"AttributeError" in store.get("failure")


GARBAGE = [b"\xff\xfe", b" ", b"1 0", b"0 0 nothing", b"70000 0 all", b"-1 1 x"]


@pytest.mark.parametrize("value", GARBAGE)
@pytest.mark.parametrize("when", ["polled", "announced"])
def test_a_failure_that_no_rank_has_written_ends_the_process(monkeypatch, ended, value, when):
    """Else its thread would end, and the run would go on without anyone to watch it."""
    said = []
    monkeypatch.setattr(failure_board, "print_error_line", said.append)
    plain = HashStore()
    plain.set("failure", value)
    store = Mock(wraps=plain)
    if when == "announced":  # it comes between two requests of this rank
        store.check = lambda keys: keys != ["failure"] and plain.check(keys)
    board = failure_board.FailureBoard(1, 2, LaunchedProcesses(1, 1, ()))
    board.add_poll(lambda store: "something" if when == "announced" else None)
    board.connect(store)
    assert ended.get(timeout=1000) == 1
    assert said == [f"global rank 1 stops because of {Failure.decode(value).cause}"]
    assert repr(value) in said[0]


def test_many_ranks_take_turns_to_read_the_store(monkeypatch):
    monkeypatch.setattr(failure_board, "POLL_SECONDS", 1e-3)
    store, has_polled, polls = Mock(wraps=HashStore()), threading.Event(), []
    launched = LaunchedProcesses(0, 0, ())
    launched.find_launcher_failure = lambda: (
        polls.append(0) or len(polls) == 100 and has_polled.set()
    )
    board = failure_board.FailureBoard(5, 256, launched)
    board._store = store
    assert has_polled.wait(1000)
    board.stop()
    assert 24 <= store.check.call_count / 2 <= len(polls) / 4 + 1  # failure and roll


def test_a_failure_is_said_where_the_store_does_not_answer(monkeypatch):
    """Global rank 0, which hosts it, may be stopped for a while."""
    store, said, lines = HashStore(), Queue(), []
    for key in ("seen/0", "done/0"):
        store.set(key, "")

    def compare_set(*args):
        lines.append(said.get(timeout=1000))
        return store.compare_set(*args)

    silent = Mock(wraps=store, compare_set=compare_set)
    monkeypatch.setattr(failure_board, "exit_after_delay", lambda *_: None)
    monkeypatch.setattr(failure_board, "_CAUSE_SECONDS", 0.1)
    monkeypatch.setattr(failure_board, "print_error_line", said.put)
    board = failure_board.FailureBoard(1, 2, LaunchedProcesses(1, 1, ()))
    board.connect(silent)
    board.report(SystemExit(1), "", 1)
    (line,) = lines
    assert line.startswith("global rank 1 stops: sys.exit(1); global rank 0, which")


def test_a_failure_is_announced_before_it_is_said(monkeypatch):
    store, said = HashStore(), []
    store.set("seen/1", "")
    store.set("done/1", "")
    monkeypatch.setattr(failure_board, "exit_after_delay", lambda *_: None)
    monkeypatch.setattr(
        failure_board, "print_error_line", lambda line: said.append(store.check(["failure"]))
    )
    board = failure_board.FailureBoard(0, 2, LaunchedProcesses(0, 0, ()))
    board.connect(store)
    board.report(KeyError("in a hook"), "stage 1, F of microbatch 0", 1)
    assert said == [True]
