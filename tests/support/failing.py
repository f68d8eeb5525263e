"""A run that fails as it is told to; started as a user's script is, by Lightning's own launcher.

python tests/support/failing.py --hook on_fit_start --act raise --rank 1
"""

import os
import signal
import sys
import threading
import time
from argparse import ArgumentParser
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[2]))

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_pipeoffload import PipeOffloadStrategy, data_parallel_rank, data_parallel_size
from lightning_pipeoffload.optimizers import OptimizerSnapshot
from lightning_pipeoffload.runtime.comm import transport
from tests.support import fits


def fail(error):
    raise error


def send(signum):
    os.kill(os.getpid(), signum)


def rank_of():
    return int(os.environ.get("LOCAL_RANK", "0"))


def lose_reader():
    """Make standard error a pipe that nobody reads; what reads it until now waits for our end."""
    os.dup(2)
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)


def kill_a_worker():
    import multiprocessing

    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)


def break_messages():
    """Let a thread that sends messages fail, as where an accelerator's error is first seen."""

    def fail_in_it(*args):
        fail(torch.AcceleratorError("CUDA error: device-side assert triggered"))

    transport.late_values = SimpleNamespace(start_host_copy=lambda tensor: fail_in_it)


ACTS = {
    "raise": lambda: fail(RuntimeError("on purpose")),
    "refuse": lambda: fail(ValueError("not like this")),
    "oom": lambda: fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
    "exit": lambda: sys.exit(3),
    "exit_0": lambda: sys.exit(0),
    "stop": lambda: send(signal.SIGSTOP),
    "kill": lambda: send(signal.SIGKILL),
    "terminate": lambda: send(signal.SIGTERM),
    "interrupt": lambda: os.killpg(os.getpgrp(), signal.SIGINT),
    "kill_a_worker": kill_a_worker,
    "break_messages": break_messages,
    "nothing": lambda: None,
}
HOOKS = [
    *("setup", "configure_model", "configure_optimizers", "on_fit_start", "on_train_start"),
    *("on_train_batch_start", "training_step", "on_before_optimizer_step", "optimizer_step"),
    *("validation_step", "on_validation_epoch_end", "on_save_checkpoint", "on_train_epoch_end"),
    *("on_fit_end", "teardown", "predict_step", "on_predict_epoch_end"),
]
TAKEN_BACK = "taken_back"
STEPS = {"training_step", "validation_step", "predict_step"}
AFTER_TWO_STEPS = {
    *("on_train_batch_start", "training_step", "on_before_optimizer_step", "backward")
}


class Failing(fits.Net):
    """Fails once, in one hook of one rank.

    Args:
        hook: a name in HOOKS, or "backward": a hook of a parameter of the first or last stage.
        act: what happens there.
        ranks: on which global ranks.
        wait: the other ranks wait in that hook for ever, as behind a lock or in a long computation.
    """

    def __init__(self, hook, act, ranks, wait):
        super().__init__()
        self.hook, self.act, self.ranks, self.wait = hook, act, ranks, wait
        for parameter in (self.embed.weight, self.norm.weight):
            parameter.register_hook(lambda _: self.visit("backward"))

    def visit(self, hook):
        trainer = self.trainer
        if hook != self.hook or trainer.sanity_checking:
            return
        if hook in STEPS and not trainer.strategy.running_action:
            return  # the probe
        if hook in AFTER_TWO_STEPS and trainer.global_step < 2:
            return
        if trainer.global_rank in self.ranks:
            self.hook = "done"
            ACTS[self.act]()
        elif self.wait:
            threading.Event().wait()


def visiting(hook):
    def call(self, *args, **kwargs):
        self.visit(hook)
        return getattr(super(Failing, self), hook)(*args, **kwargs)

    return call


for name in HOOKS:
    setattr(Failing, name, visiting(name))


class FailingSamples(TensorDataset):
    """Fails where some ranks read it, or does something else there."""

    def __init__(self, data, ranks, act):
        super().__init__(*data.tensors)
        self.ranks, self.act = ranks, act

    def __getitem__(self, index):
        if index == 20 and rank_of() in self.ranks:
            raise ValueError("a bad sample")
        if index == 20 and self.act:
            ACTS[self.act]()
            time.sleep(0.1)  # the signal comes while the sample is read
        return super().__getitem__(index)


class UnevenStream(IterableDataset):
    """Is shared out over the replicas, but replica 1 has three batches of four samples only."""

    def __iter__(self):
        rank = data_parallel_rank()
        part = list(fits.samples())[rank :: data_parallel_size()]
        yield from part[:12] if rank == 1 else part


class Callback(L.Callback):
    """Changes one rank's batches."""

    def __init__(self, act, rank):
        self.act, self.rank = act, rank

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if self.act == "other_batch" and self.rank == trainer.global_rank and batch_idx == 2:
            batch["x"] += 1


class Strategy(PipeOffloadStrategy):
    """Fails when all processes are started and the ranks begin to connect."""

    def __init__(self, before_connecting, **options):
        super().__init__(**options)
        self.before_connecting = before_connecting

    def setup_environment(self):
        if self.before_connecting is not None:
            self.before_connecting()
        super().setup_environment()


def visit_what_is_taken_back(module):
    """Visit the module in the middle of a step that is taken back, in the second epoch."""
    plain = OptimizerSnapshot.repeat

    def repeat(snapshot, change_gradients):
        # A rank may be forked from one that has done this for a module of its own.
        if module._trainer is not None and module.trainer.current_epoch == 1:
            module.visit(TAKEN_BACK)
        plain(snapshot, change_gradients)

    OptimizerSnapshot.repeat = repeat


def read_options():
    parser = ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--sharding", default="none")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--hook", choices=[*HOOKS, "backward", TAKEN_BACK])
    parser.add_argument("--act", default="nothing")
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--bad-samples-on", type=int, nargs="*", default=[])
    parser.add_argument("--before", choices=["fit", "connecting"])
    parser.add_argument("--in-dataset", default="")
    parser.add_argument("--uneven", action="store_true")
    parser.add_argument("--then", choices=["call", "wait"])
    parser.add_argument("--rank-too", type=int)
    parser.add_argument("--without-reader", action="store_true")
    parser.add_argument("--timeout", type=float, default=1800.0)
    parser.add_argument("--save-to")
    parser.add_argument("--save-on-exception", action="store_true")
    return parser.parse_args()


def main():
    # As in a terminal: what a shell starts in the background ignores Ctrl-C from the start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Private: how often a worker looks for its parent, which may have been killed.
    torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.2
    options = read_options()
    if options.act == "break_messages":  # as messages of GPUs go over gloo
        transport._is_staged = lambda device: True
    # A batch that a killed worker has sent can be read without it.
    torch.multiprocessing.set_sharing_strategy("file_system")
    is_at_fault = rank_of() == options.rank
    if options.without_reader:
        lose_reader()
    if options.before == "fit" and is_at_fault:
        ACTS[options.act]()
    data = DataLoader(
        FailingSamples(fits.samples(), options.bad_samples_on, options.in_dataset),
        batch_size=8,
        collate_fn=fits.collate,
        num_workers=options.workers,
    )
    saving = {"save_on_exception": options.save_on_exception}
    checkpoints = [ModelCheckpoint(options.save_to, **saving)] if options.save_to else []
    trainer = L.Trainer(
        **fits.SILENT,
        devices=options.devices,
        strategy=Strategy(
            ACTS[options.act] if options.before == "connecting" and is_at_fault else None,
            num_microbatches=4,
            data_parallel_size=options.replicas,
            sharding=options.sharding,
            timeout=timedelta(seconds=options.timeout),
            optimizer_sync="post_validation" if options.hook == TAKEN_BACK else "barrier",
        ),
        gradient_clip_val=1e-3 if options.hook == TAKEN_BACK else None,
        max_epochs=3,
        enable_checkpointing=bool(checkpoints),
        callbacks=[Callback(options.act, options.rank), *checkpoints],
    )
    ranks = {options.rank, options.rank_too}
    module = Failing(options.hook, options.act, ranks, options.wait)
    visit_what_is_taken_back(module)
    if "predict" in str(options.hook):
        trainer.predict(module, data)
    else:
        if options.uneven:
            data = DataLoader(UnevenStream(), batch_size=4, collate_fn=fits.collate)
        trainer.fit(module, data, fits.loader())
    if options.then:
        if is_at_fault:
            ACTS[options.act]()
        if options.then == "wait" and trainer.is_global_zero:
            threading.Event().wait()
        trainer.validate(module, fits.loader())


if __name__ == "__main__":
    main()
