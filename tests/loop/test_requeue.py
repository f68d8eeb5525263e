"""A fit that gets the signal to requeue is saved once, whole, by all ranks, and resumes there."""

import json
import os
import random
import signal
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed import HashStore

from lightning_pipeoffload.loop.requeue import Requeue
from lightning_pipeoffload.processes import free_port
from tests.support import fits
from tests.support.ending_fits import run_both
from tests.support.pairs import first

NUM_STEPS = 10
_PATIENCE_SECONDS = 500


class Signal(L.Callback):
    """Sends this process the signal when so many optimizer steps are done.

    Args:
        step: after which.
        in_validation: when the validation starts, else the next batch.
        is_first: whether to go on when all ranks have heard of it only.
    """

    def __init__(self, step, in_validation, is_first):
        self._step, self._in_validation, self._is_first = step, in_validation, is_first

    def on_train_batch_start(self, trainer, *_):
        if not self._in_validation:
            self._send(trainer)

    def on_validation_start(self, trainer, *_):
        if self._in_validation:
            self._send(trainer)

    def _send(self, trainer):
        if trainer.global_step == self._step:
            os.kill(os.getpid(), signal.SIGUSR1)
            if self._is_first:
                assert trainer.strategy.fit.batch_end._requeue._is_agreed.wait(_PATIENCE_SECONDS)


def fit_rank(rank, port, root, callbacks, options):
    """Be one rank of a fit over two epochs; global rank 0 adds its losses to a file."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        PATH=f"{root}/bin:{os.environ['PATH']}",
        SLURM_JOB_ID="7",
        SLURM_JOB_NAME="train",
        SLURM_LOCALID=str(rank),
        SLURM_NODEID="0",
        SLURM_NTASKS="2",
        SLURM_NTASKS_PER_NODE="2",
        SLURM_PROCID=str(rank),
        SLURM_STEP_ID="0",
    )
    L.seed_everything(7, workers=True, verbose=False)
    record = fits.Record()
    accumulate = options.pop("accumulate_grad_batches", 1)
    trainer = fits.trainer(
        2,
        options,
        accumulate_grad_batches=accumulate,
        callbacks=[record, *callbacks],
        default_root_dir=f"{root}/root",
        max_epochs=2,
    )
    loader = fits.loader("shuffled", batch_size=8 // accumulate)
    trainer.fit(fits.Net(), loader, fits.loader())
    if trainer.is_global_zero:
        with Path(root, "losses").open("a") as file:
            file.write(json.dumps(record.losses) + "\n")


def fit(root, callbacks, options):
    """Run both ranks to their end, which has to be a good one."""
    port = free_port()
    arguments = [(rank, port, str(root), callbacks[rank], options) for rank in range(2)]
    assert run_both(fit_rank, arguments) == [0, 0]


def make_scontrol(root):
    """Make a command that notes its arguments."""
    command = root / "bin" / "scontrol"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\necho "$@" >> "{root}/requeued"\n')
    command.chmod(0o755)


class Rank:
    """Stands for a trainer; records when it is saved."""

    def __init__(self, rank, world_size):
        self.global_rank, self.world_size, self.global_step = rank, world_size, 0
        self.state, self.training = SimpleNamespace(fn=TrainerFn.FITTING), True
        self._signal_connector = self
        self.requeue = Requeue(self, SLURMEnvironment(), ExitStack())
        self.is_in_batch = self.has_stepped = False
        self.saved = []

    def _slurm_sigusr_handler_fn(self, signum, frame):
        self.saved.append((self.global_step, self.has_stepped))

    def go_on(self, draw):
        """Go to the end of a step, or to that of its batch if there the rank would not wait."""
        if not self.is_in_batch:
            self.has_stepped = draw.random() < 0.5
            self.global_step += self.has_stepped
            self.is_in_batch = True
        elif self.requeue._is_agreed.is_set() or not self.requeue._asks:
            self.requeue.requeue_after_agreed_step()
            self.is_in_batch = False


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_all_ranks_save_after_the_same_step_however_far_apart_they_are(seed, num_ranks):
    draw, store = random.Random(seed), HashStore()
    ranks = [Rank(rank, num_ranks) for rank in range(num_ranks)]
    told = {draw.randrange(300): rank for rank in ranks[: draw.randint(1, num_ranks)]}
    for moment in range(100 * num_ranks + 300):
        if moment in told:
            told[moment].requeue.record_signal(10, None)
        draw.choice(ranks).go_on(draw)
        draw.choice(ranks).requeue.poll(store)
    (saved,) = {tuple(rank.saved) for rank in ranks}
    ((_, has_stepped),) = saved
    assert has_stepped


# hook of the signals, and the steps that are done by then on one rank and on the other
CASES = {
    "a step": (False, (3, 8), {}),
    "folder": (False, (8, 3), {"save_distributed_checkpoint": True}),
    "accumulated": (False, (4, 7), {"accumulate_grad_batches": 2}),
    "the last validation": (True, (NUM_STEPS, NUM_STEPS), {}),
    "replicas": (False, (4, 2), {"data_parallel_size": 2}),
}


@pytest.mark.parametrize("case", first(1, [*CASES]))
def test_a_fit_goes_on_where_it_was_saved(tmp_path, case):
    in_validation, steps, options = CASES[case]
    make_scontrol(tmp_path)
    first = [step == min(steps) for step in steps]
    signals = [[Signal(*given)] for given in zip(steps, [in_validation] * 2, first, strict=True)]
    fit(tmp_path, signals, options)
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    saved = tmp_path / "root" / "hpc_ckpt_1.ckpt"
    assert list(saved.parent.iterdir()) == [saved]
    fit(tmp_path, ([], []), options)
    whole, rest = map(json.loads, (tmp_path / "losses").read_text().splitlines())
    done = (len(whole) - len(rest)) // options.get("accumulate_grad_batches", 1)
    assert min(steps) <= done <= min(steps) + 2
    assert rest == whole[len(whole) - len(rest) :]
