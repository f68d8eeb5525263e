"""Starts the ranks of a machine as forks of an interpreter, whose cells no script repeats.

::

    interpreter  fork, wait ............................ load state and weights, or raise an error
    rank 0             the trainer, dump state and weights
    rank 1             the trainer, dump weights

All ranks are forks, global rank 0 too: the interpreter itself touches no device, and goes on when
a rank is lost. It forwards an interrupt; the ranks end by themselves when it is gone.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import ForkProcess
from operator import attrgetter
from threading import Thread
from typing import IO, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.call import (
    _call_and_handle_interrupt,  # private: what every entry of the trainer calls
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_pipeoffload.processes.failure import EXIT_SECONDS, POLL_SECONDS, describe
from lightning_pipeoffload.processes.launcher import JointLauncher
from lightning_pipeoffload.processes.returned_state import (
    ReturnedState,
    dump_tensors,
    load_tensors,
    shapes_in,
)
from lightning_pipeoffload.processes.run_store import free_port
from lightning_pipeoffload.runtime.comm import ProcessGroups
from lightning_pipeoffload.runtime.users_code import WrappedHook

_WEIGHTS_FILE = "pipeoffload_notebook.ckpt"
_ENVIRONMENT = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
_STARTS = "%d ranks run in processes forked from this interpreter; what they train comes back"
_LEFT_OUT = "{}: attributes of the module that cannot be pickled stay as they were before"
_IN_CHECKPOINT = (
    "the ranks alone have the layers that configure_model makes; their weights are in %s, for "
    "load_from_checkpoint"
)


def is_interactive() -> bool:
    """Whether this process is an interactive interpreter, as a notebook's kernel is."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


class ForkableStrategy(Protocol):
    """What the launcher needs of a strategy."""

    def tensor_names_to_return(self) -> set[str]:
        """Return the parameters and buffers of which this rank returns the value; collective."""

    def summarize_run(self) -> Any:
        """Return what the interpreter's strategy shows of the run, on global rank 0."""

    def restore_run_summary(self, described: Any) -> None:
        """Show what :meth:`summarize_run` has returned, in the interpreter."""


class _Outcome(NamedTuple):
    """What global rank 0 returns of an entry of the trainer.

    Attributes:
        result: The entry's own result.
        described: Of :meth:`ForkableStrategy.summarize_run`.
        weights_path: The checkpoint that has the weights; "": each rank returns its own.
        is_tuned: Whether a learning rate finder or the like has ended the fit.
    """

    result: Any
    described: Any
    weights_path: str
    is_tuned: bool


class TracebackOfRank(Exception):  # noqa: N818 - it is the cause of an error, not one
    """Carries the traceback of a forked rank's error as text, as that error's ``__cause__``."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


class _RankExit(NamedTuple):
    """How a rank has ended, which its report begins with.

    Attributes:
        error: What it has raised; None: nothing.
        text: The error's traceback.
        at: When that was, in seconds of a clock of the machine.
    """

    error: BaseException | None = None
    text: str = ""
    at: float = 0.0


class _Rank(NamedTuple):
    """A forked rank, as the interpreter sees it.

    Attributes:
        process: The process.
        report: Its ``_RankExit``; of global rank 0, if it has raised nothing, its state follows.
        tensors: Its weights.
    """

    process: ForkProcess
    report: IO[bytes]
    tensors: IO[bytes]


class ForkingLauncher(JointLauncher):
    """Runs each call of the trainer in forks of this process, and brings their results back.

    Args:
        environment: The cluster environment, of one machine.
        num_processes: The number of ranks; one rank runs in this process.
        end: A function that waits for the other ranks.
        fail: A function that reports an exception to the other ranks.
        ranks: The strategy.

    Attributes:
        has_fitted: Whether a fit has ended, and with it the optimizers' state.
    """

    def __init__(
        self,
        environment: ClusterEnvironment,
        num_processes: int,
        end: Callable[[], None],
        fail: Callable[[BaseException], None],
        ranks: ForkableStrategy,
    ) -> None:
        super().__init__(environment, num_processes, 1, end, fail)
        self._ranks = ranks
        self._is_rank = False
        self.has_fitted = False
        self._plain_handler: Any = signal.default_int_handler
        self._muted_hooks: list[WrappedHook] = []

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._plain_handler = signal.getsignal(signal.SIGINT)
        if self._is_rank or self.num_processes == 1:
            return super().launch(function, *args, **kwargs)
        trainer = kwargs.pop("trainer")
        try:
            self._refuse(trainer)
            rank_zero_info(_STARTS, self.num_processes)
            call = _TrainerCall(trainer, self._ranks, lambda: function(*args, **kwargs))
            if dist.is_initialized():  # by a run of one rank, whose threads are not forked
                dist.destroy_process_group()
            with ExitStack() as at_end:
                ranks = [self._fork(call, rank, at_end) for rank in range(self.num_processes)]
                lost = _wait_for([rank.process for rank in ranks])
                outcome = call.load_outcome(ranks, lost)
        except BaseException:
            self._mute_hooks(trainer)
            raise
        self.has_fitted |= call.trains and not outcome.is_tuned
        return outcome.result

    def _refuse(self, trainer: Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING and self.has_fitted:
            raise RuntimeError(
                "this Trainer has fitted once, and its optimizer's state has ended with the "
                "processes of that fit; make another Trainer, whose fit(ckpt_path=...) goes on "
                "from a checkpoint"
            )
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and torch.get_device_module(accelerator).is_initialized():
            raise RuntimeError(
                f"a cell has used {accelerator.type}, which processes forked from this "
                f"interpreter then cannot use; restart the kernel, and leave out of the cells "
                f"before fit what touches the device: .to({accelerator.type!r}), .cuda(), "
                f"torch.cuda.get_device_name(), a model loaded with device_map"
            )

    def _fork(self, call: _TrainerCall, rank: int, at_end: ExitStack) -> _Rank:
        report: IO[bytes] = at_end.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - it is
        tensors: IO[bytes] = at_end.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - it is
        process = multiprocessing.get_context("fork").Process(
            target=self._run_rank, args=(call, rank, report, tensors), name=f"global rank {rank}"
        )
        process.start()
        at_end.callback(_kill, process)
        return _Rank(process, report, tensors)

    def _run_rank(
        self, call: _TrainerCall, rank: int, report: IO[bytes], tensors: IO[bytes]
    ) -> None:
        # What the interpreter has may need its threads to end, which are not forked.
        gc.freeze()  # circles that are garbage stay too
        ProcessGroups.abandon_inherited()
        self._is_rank = True
        self.started.clear()  # what the interpreter has started is no child of this process
        os.setpgid(0, 0)  # an interrupt comes from the interpreter, and once
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _close_listening_sockets()
        Thread(target=_exit_with_parent, args=(call.interpreter,), daemon=True).start()
        os.environ.update(call.environment, LOCAL_RANK=str(rank))
        torch.set_num_threads(1)  # no thread but this one is forked, of those that share its work
        with _without_output() if rank else nullcontext():
            status = call.run(rank, report, tensors, self)
        sys.exit(status)

    def _mute_hooks(self, trainer: Any) -> None:
        """Leave out the hooks on an exception, which the ranks have called."""
        owners = [*trainer.callbacks, *filter(None, [trainer.datamodule])]
        self._muted_hooks = [WrappedHook(each, "on_exception", _do_nothing) for each in owners]

    @override
    def interrupt_exception(self) -> BaseException:
        """Return the exception that ends the call of an interrupted trainer."""
        if self._is_rank:
            return super().interrupt_exception()
        signal.signal(signal.SIGINT, self._plain_handler)  # Lightning has it ignored
        return KeyboardInterrupt()

    @override
    def restore_exception_hooks(self) -> None:
        for hook in self._muted_hooks:
            hook.remove()
        self._muted_hooks = []


class _TrainerCall:
    """One call of the trainer: what runs in each rank, and what comes back.

    Args:
        trainer: The interpreter's trainer.
        ranks: The strategy.
        function: What the trainer has called the launcher with.
    """

    def __init__(
        self, trainer: Trainer, ranks: ForkableStrategy, function: Callable[[], Any]
    ) -> None:
        self._trainer, self._ranks, self._function = trainer, ranks, function
        self._module: LightningModule = trainer.lightning_module
        self.trains = trainer.state.fn == TrainerFn.FITTING
        self.interpreter = os.getpid()
        port = os.environ.get("MASTER_PORT") or str(free_port())
        self.environment = {**_ENVIRONMENT, "MASTER_PORT": port}
        self._state = ReturnedState(trainer)
        self._shapes = shapes_in(self._module)

    # In a rank

    def run(self, rank: int, report: IO[bytes], tensors: IO[bytes], launcher: JointLauncher) -> int:
        """Run the trainer and write what the interpreter reads; return the exit status."""
        try:
            _check_autograd()
            if rank == 0:
                self._state.begin()
            result = _call_and_handle_interrupt(self._trainer, self._function)
            weights_path = self._write_weights(tensors) if self.trains else ""
            pickle.dump(_RankExit(), report)
            if rank == 0:
                described = self._ranks.summarize_run()
                outcome = _Outcome(result, described, weights_path, launcher.is_tuned)
                self._state.dump(outcome, report)
        except BaseException as error:
            report.seek(0)
            pickle.dump(_rank_exit_for_error(error), report)
            return 1
        finally:
            report.flush()
            tensors.flush()
        return 0

    def _write_weights(self, tensors: IO[bytes]) -> str:
        if shapes_in(self._module) == self._shapes:
            dump_tensors(self._module, self._ranks.tensor_names_to_return(), tensors)
            return ""
        path = os.path.join(self._trainer.default_root_dir, _WEIGHTS_FILE)
        self._trainer.save_checkpoint(path, weights_only=True)
        return path

    # In the interpreter

    def load_outcome(self, ranks: Sequence[_Rank], lost: ForkProcess | None) -> _Outcome:
        """Read what the ranks have written.

        Args:
            ranks: The ranks, which have ended.
            lost: The first one that has ended by itself without success.

        Raises:
            BaseException: The first that a rank has raised.
            RuntimeError: A rank was lost.
        """
        ends = [_read(rank.report) for rank in ranks]
        raised = (end for end in ends if end is not None and end.error is not None)
        first = min(raised, key=attrgetter("at"), default=None)
        if first is not None and first.error is not None:
            raise first.error from TracebackOfRank(first.text)
        silent = [rank.process for rank, end in zip(ranks, ends, strict=True) if end is None]
        # One that has left with success ended first: the others end because of it.
        lost = next((process for process in silent if process.exitcode == 0), lost)
        if lost is not None:
            raise RuntimeError(f"{lost.name} {_describe_end(lost)}")
        outcome: _Outcome = self._state.load(ranks[0].report)
        self._ranks.restore_run_summary(outcome.described)
        if self._state.left_out:
            rank_zero_warn(_LEFT_OUT.format(", ".join(self._state.left_out)))
        if outcome.weights_path:
            rank_zero_info(_IN_CHECKPOINT, outcome.weights_path)
        elif self.trains:
            for rank in ranks:
                rank.tensors.seek(0)
                load_tensors(self._module, rank.tensors)
        return outcome


# In a rank


def _exit_with_parent(interpreter: int) -> None:
    while os.getppid() == interpreter:
        time.sleep(POLL_SECONDS)
    os._exit(1)


def _close_listening_sockets() -> None:
    """Leave the interpreter's ports to it: a kernel that is restarted binds the same ones."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # such as the descriptor of the listing
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as duplicate:
                listens = duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens:
                os.close(int(name))


def _check_autograd() -> None:
    """Raise an error where autograd cannot run in a fork.

    With an accelerator in the machine a first backward starts threads, which no fork has.
    """
    try:
        torch.ones((), requires_grad=True).backward()
    except RuntimeError as error:
        raise RuntimeError(
            "a cell has run a backward before this fit, after which torch computes no gradients "
            "in processes forked from this interpreter; restart the kernel, and leave that cell out"
        ) from error


@contextmanager
def _without_output() -> Iterator[None]:
    """Leave the cell's output to global rank 0."""
    plain = sys.stdout, sys.stderr
    with open(os.devnull, "w") as nowhere:
        for handler in _handlers():
            if isinstance(handler, logging.StreamHandler) and handler.stream in plain:
                handler.setStream(nowhere)
        sys.stdout = sys.stderr = nowhere
        yield


def _handlers() -> Iterator[logging.Handler]:
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in loggers:
        yield from getattr(logger, "handlers", ())  # a placeholder has none


def _rank_exit_for_error(error: BaseException) -> _RankExit:
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # of a class that its arguments do not make anew
        error = RuntimeError(describe(error))
    return _RankExit(error, text, time.monotonic())


# In the interpreter


def _wait_for(processes: Sequence[ForkProcess]) -> ForkProcess | None:
    """Wait until all ranks have ended; return the first that has not ended well, if any.

    The others have a while to end by themselves; those that a signal has left alone do not.
    """
    lost, patience = None, EXIT_SECONDS
    try:
        while running := [each for each in processes if each.exitcode is None]:
            wait_for_any([each.sentinel for each in running], POLL_SECONDS)
            ended = [each for each in processes if each.exitcode]
            lost = lost or min(ended, key=lambda each: each.exitcode or 0, default=None)
            if lost is not None:
                patience -= POLL_SECONDS
            if lost is not None and (patience < 0 or (lost.exitcode or 0) < 0):
                for each in running:
                    each.kill()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _interrupt([each for each in processes if each.exitcode is None])
        raise
    return lost


def _interrupt(processes: Sequence[ForkProcess]) -> None:
    for each in processes:
        os.kill(each.ident or 0, signal.SIGINT)
    late_at = time.monotonic() + EXIT_SECONDS
    for each in processes:
        each.join(max(0.0, late_at - time.monotonic()))


def _kill(process: ForkProcess) -> None:
    process.kill()
    process.join()


def _read(report: IO[bytes]) -> _RankExit | None:
    report.seek(0)
    try:
        end: _RankExit = pickle.load(report)
    except EOFError:  # it has ended before it wrote one
        return None
    return end


def _describe_end(process: ForkProcess) -> str:
    status = process.exitcode or 0
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _do_nothing(*_: Any) -> None:
    """Replace a hook."""
