"""When a rank fails, every rank of the run ends soon, says why, and leaves no process."""

import os
import re
import signal

import pytest
from lightning.pytorch import Trainer

from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.processes import free_port
from tests.support import failing, fits
from tests.support.failing import HOOKS, STEPS
from tests.support.forked_runs import run_forked
from tests.support.forks import FORKS, fork
from tests.support.pairs import pairs, slow, some

BATCH = ("--hook", "on_train_batch_start", "--act")


def run_failing(*arguments):
    return run_forked(failing.main, *arguments)


def because(rank, cause, other=None):
    other = 1 - rank if other is None else other
    return f"[pipeoffload] global rank {other} stops because of global rank {rank}{cause}"


def assert_told_once(run, rank, error, place=""):
    """The rank at fault shows its traceback, the other says why it stops in one line."""
    assert run.status != 0
    pattern = rf"^(?:\[rank\d\]: )?(?:torch\.)?{re.escape(error)}$"
    tracebacks = re.findall(pattern, run.errors, re.MULTILINE)
    assert len(tracebacks) == 1
    if place:
        assert run.lines[0] == f"[pipeoffload] global rank {rank} failed in {place}"
        error = f"{error} (in {place})"
    assert run.lines[bool(place) :] == [because(rank, f": {error}")]


@pytest.mark.parametrize("hook", some([hook for hook in HOOKS if hook not in STEPS], 12))
def test_an_exception_in_a_hook_stops_all(hook, tmp_path):
    rank = HOOKS.index(hook) % 2
    run = run_failing(
        "--hook", hook, "--act", "raise", "--rank", str(rank), "--save-to", str(tmp_path)
    )
    assert_told_once(run, rank, "RuntimeError: on purpose")


OUT_OF_MEMORY = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.mark.parametrize(
    ("hook", "act", "error", "rank"),
    [
        ("training_step", "raise", "RuntimeError: on purpose", 0),
        *(slow((hook, "raise", "RuntimeError: on purpose", 1)) for hook in sorted(STEPS)),
        slow(("backward", "oom", OUT_OF_MEMORY, 1)),
        slow(("backward", "oom", OUT_OF_MEMORY, 0)),
    ],
)
def test_an_exception_in_a_step_or_a_backward_names_the_place(hook, act, error, rank):
    run = run_failing("--hook", hook, "--act", act, "--rank", str(rank))
    kind = "B" if hook == "backward" else "F"
    # The last stage is on global rank 0.
    assert_told_once(run, rank, error, f"stage {1 - rank}, {kind} of microbatch 0")


@pytest.mark.parametrize("rank", [1, slow(0)])
def test_an_error_of_a_thread_that_sends_messages_stops_all(rank):
    run = run_failing(*BATCH, "break_messages", "--rank", str(rank))
    assert run.status == 1
    error = "AcceleratorError: CUDA error: device-side assert triggered"
    cause = f": {error} (while sending to global rank {1 - rank})"
    assert because(rank, cause) in run.lines
    assert f"torch.{error}" in run.errors


@pytest.mark.parametrize("rank", some([1, 0], 2))
def test_a_callback_that_saves_on_an_exception_does_not_wait_for_ever(rank, tmp_path):
    options = ("--save-to", str(tmp_path), "--save-on-exception")
    run = run_failing(*BATCH, "raise", "--rank", str(rank), *options)
    assert_told_once(run, rank, "RuntimeError: on purpose")
    assert run.errors.count("save_checkpoint() needs all ranks, and they stop") == 1
    assert "During handling" not in run.errors
    assert not list(tmp_path.iterdir())


def test_ranks_whose_hooks_make_other_batches_are_reported():
    run = run_failing("--act", "other_batch", "--rank", "1")
    assert run.status == 1
    assert "global ranks [1] have another batch in training_step than global rank 0" in run.errors


@pytest.mark.parametrize("rank", some([1, 0], 2))
def test_a_refusal_on_one_rank_ends_a_rank_that_waits_with_the_same_status(rank):
    arguments = ("--hook", "on_train_start", "--act", "refuse", "--rank", str(rank))
    run = run_failing(*arguments, "--wait")
    assert run.lines == [because(rank, ": ValueError: not like this")]
    assert run.status == (1 if rank == 0 else 2)  # a script that raises ends with 1
    assert "frame #" not in run.errors  # torch's own complaint about a store that is gone


@pytest.mark.parametrize(
    ("rank", "how"), [slow((0, ", which is gone")), (1, ", which was killed by SIGKILL")]
)
def test_a_killed_rank_stops_all(rank, how):
    run = run_failing(*BATCH, "kill", "--rank", str(rank), "--workers", "2")
    assert run.status == (137 if rank == 0 else 1)
    assert run.lines == [because(rank, how)]


def be_node(rank, port, pipe):
    """Train as one of two machines; 1 is killed, and 0 waits for nothing that gloo reports."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NODE_RANK=str(rank))
    os.dup2(pipe.fileno(), 2)
    pipe.close()
    strategy = PipeOffloadStrategy(num_microbatches=4)
    trainer = Trainer(**fits.SILENT, devices=1, num_nodes=2, strategy=strategy, max_epochs=3)
    trainer.fit(failing.Failing("on_train_batch_start", "kill", {1}, wait=True), fits.loader())


def test_a_killed_machine_stops_one_that_waits_for_its_device():
    (reader, writer), port = FORKS.Pipe(duplex=False), free_port()
    nodes = [fork(be_node, rank, port, writer) for rank in range(2)]
    writer.close()
    with os.fdopen(os.dup(reader.fileno())) as pipe:
        errors = pipe.read()
    for node in nodes:
        node.join()
    assert [node.exitcode for node in nodes] == [1, -signal.SIGKILL]
    assert because(1, ", which is gone") in errors


@pytest.mark.parametrize(
    ("hook", "rank"),
    some(pairs(["on_train_batch_start", "validation_step", "predict_step"], [0, 1]), 3),
)
def test_a_rank_that_is_told_to_stop_stops_all(hook, rank):
    run = run_failing("--hook", hook, "--act", "terminate", "--rank", str(rank))
    what = "told to stop by SIGTERM"
    assert run.status == 143
    assert set(run.lines) == {
        f"[pipeoffload] global rank {rank} stops: {what}",
        because(rank, f": {what}"),
    }


@pytest.mark.parametrize(
    ("act", "code", "rank"), some([("exit", 3, 1), ("exit_0", 0, 1), ("exit_0", 0, 0)], 3)
)
def test_a_rank_that_exits_in_a_hook_stops_all(act, code, rank):
    run = run_failing(*BATCH, act, "--rank", str(rank))
    assert run.status == (code or 1)
    what = f"sys.exit({code}) in on_train_batch_start"
    assert set(run.lines) == {
        f"[pipeoffload] global rank {rank} stops: {what}",
        because(rank, f": {what}"),
    }


@pytest.mark.parametrize("devices", some([2, 4], 2))
def test_ctrl_c_ends_all_with_the_status_of_a_shell(devices, tmp_path):
    run = run_failing(
        *(*BATCH, "interrupt", "--rank", "1", "--devices", str(devices), "--workers", "2"),
        *("--save-to", str(tmp_path), "--save-on-exception"),
    )
    assert run.status == 130
    # A worker that was handing a batch over: Python's own thread says so, under any strategy.
    assert all("resource_sharer" in each for each in run.errors.split("Traceback")[1:])
    assert len(run.lines) == 1
    assert re.search(r"global rank \d stops: interrupted$", run.lines[0])


@pytest.mark.parametrize("workers", [0, slow(2)])
def test_an_exception_in_a_dataset_stops_all(workers):
    run = run_failing("--workers", str(workers), "--bad-samples-on", "0", "1")
    assert run.status == 1
    assert len(run.lines) == 1
    assert re.search(r"global rank 0: ValueError: .*a bad sample$", run.lines[0])
    assert "in __getitem__" in run.errors


def test_a_killed_worker_of_a_dataloader_stops_all():
    run = run_failing(*BATCH, "kill_a_worker", "--workers", "2", "--rank", "0")
    assert run.status == 1
    assert re.search("because of global rank 0: RuntimeError: DataLoader worker", run.lines[-1])


@pytest.mark.parametrize(("act", "status"), [("interrupt", 130), slow(("terminate", 143))])
def test_a_signal_while_data_are_read_ends_all(act, status):
    run = run_failing("--in-dataset", act, "--devices", "3")
    assert run.status == status
    assert len(run.lines) <= (1 if act == "interrupt" else 4)


@pytest.mark.parametrize(
    ("act", "how"),
    [
        slow(("raise", "ended with status 1")),
        slow(("exit_0", "ended with status 0")),
        ("kill", "was killed by SIGKILL"),
    ],
)
def test_a_rank_that_ends_before_the_ranks_connect_stops_the_others(act, how):
    run = run_failing("--before", "fit", "--act", act, "--rank", "1")
    assert run.status == 1
    assert run.lines == [because(1, f", which {how}")]


@pytest.mark.parametrize(
    ("then", "act", "rank", "how"),
    [
        ("call", "raise", 1, ", which ended with status 1"),
        slow(("call", "kill", 0, ", which is gone")),
        slow(("wait", "exit", 1, ", which ended with status 3")),
    ],
)
def test_a_rank_that_ends_between_two_calls_stops_the_others(then, act, rank, how):
    run = run_failing("--then", then, "--act", act, "--rank", str(rank))
    assert run.status == (137 if rank == 0 else 1)
    assert run.lines == [because(rank, how)]


WITHOUT_READER = [["--then", "wait", "--act", "exit"], [*BATCH, "raise"], [*BATCH, "terminate"]]


@pytest.mark.parametrize("arguments", some(WITHOUT_READER, 3))
def test_all_end_where_nobody_reads_their_messages(arguments):
    run = run_failing(*arguments, "--rank", "1", "--without-reader")
    assert run.status in {1, 143}


@pytest.mark.parametrize("rank", some([1, 0], 2))
def test_a_rank_that_stands_still_is_killed_after_the_timeout(rank):
    run = run_failing(*BATCH, "stop", "--rank", str(rank), "--timeout", "20", "--devices", "3")
    assert run.status == (137 if rank == 0 else 1)
    answers = {because(rank, ", which does not answer", other) for other in {0, 1, 2} - {rank}}
    killed = {because(rank, ", which is gone", other) for other in {1, 2} if rank == 0}
    assert len(run.lines) == 2
    assert set(run.lines) <= answers | killed
    assert set(run.lines) & answers


def test_what_all_raise_and_nobody_catches_is_shown_once():
    run = run_failing(*BATCH, "raise", "--rank", "0", "--rank-too", "1")
    assert run.status == 1
    assert run.errors.count("RuntimeError: on purpose\n") == 2  # a traceback and a line
    assert len(run.lines) == 1


def test_a_replica_with_fewer_batches_is_named():
    run = run_failing("--devices", "2", "--replicas", "2", "--uneven")
    assert run.status == 1
    cause = "stops because of replica 1, whose data has ended after 3 batches where replica 0 has"
    assert run.lines
    assert all(cause in line for line in run.lines)


def test_a_rank_of_a_replica_that_fails_is_named_with_its_replica():
    run = run_failing(
        "--devices", "4", "--replicas", "2", "--hook", "training_step", "--act", "raise",
        "--rank", "3",
    )  # fmt: skip
    place = "replica 1, stage 0, F of microbatch 0"
    assert run.status == 1
    assert run.lines[0] == f"[pipeoffload] global rank 3 failed in {place}"
    cause = f": RuntimeError: on purpose (in {place})"
    assert sorted(run.lines[1:]) == [because(3, cause, other) for other in (0, 1, 2)]
