"""Runs a generated program on one rank, and collects what is left for a comparison."""

import faulthandler
import importlib.util
import logging
import random
import shutil
import sys
import time
import traceback
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy
import torch

import lightning_pipeoffload
from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.processes import failure_board
from tests.generated.reference import CutSteps, fit_from_the_next_batch
from tests.support.fits import Journal

PACKAGE = str(Path(lightning_pipeoffload.__file__).parent)
LIMIT_SECONDS = 240


class Killed(Exception):
    """Ends a fit in the middle of an epoch."""


@dataclass
class Left:
    """What one rank has after a program.

    Attributes:
        values: what is compared, by name.
        counts: each trainer's number of microbatches; None: it has trained nothing.
        error: the traceback of what has ended it.
        refusal: the message, where it was refused by name before training.
        failed_at: when it failed; the first rank of all is at fault.
    """

    values: dict = field(default_factory=dict)
    counts: list = field(default_factory=list)
    error: str = ""
    refusal: str = ""
    failed_at: float = 0.0


class Run:
    """What a program's ``play`` gets.

    Args:
        program: The program's module.
        folder: Where it saves.
        make_strategy: Called with a trainer's number.
        devices: The number of ranks.
        left_file: Where a failing rank writes what it has, since its process may end.
    """

    def __init__(self, program, folder, make_strategy, devices, left_file):
        self.folder, self.left = folder, Left()
        self._program, self._make_strategy, self._devices = program, make_strategy, devices
        self._left_file, self._trainers, self._journals, self._started = left_file, [], [], 0

    def trainer(self, **options):
        """Make a silent trainer."""
        lightning = self._program.L
        journal = Journal()
        self._journals.append(journal)
        found = options.pop("callbacks", [])
        trainer = lightning.Trainer(
            **options,
            accelerator="cpu",
            devices=self._devices,
            strategy=self._make_strategy(len(self._trainers)),
            logger=journal,
            callbacks=[*found, _Watch(self, len(self._trainers), lightning)],
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=any(hasattr(each, "best_model_path") for each in found),
            default_root_dir=self.folder,
        )
        self._trainers.append(trainer)
        if isinstance(trainer.strategy, CutSteps):
            trainer.fit = partial(fit_from_the_next_batch, trainer.fit)
        if isinstance(trainer.strategy, PipeOffloadStrategy):
            fail = trainer.strategy.launcher._fail
            trainer.strategy.launcher._fail = lambda error: (self.note(error, trainer), fail(error))
        return trainer

    def see(self, name, value):
        """Keep a result."""
        self.left.values[f"result of {name}"] = value

    def kill_after(self, step):
        """Return a callback that ends the fit before the batch that follows so many steps."""
        return _Kill(step, self._program.L)

    def survive(self, function, *args):
        """Call a function that a callback of ``kill_after`` ends."""
        try:
            function(*args)
        except Killed:
            self.left = Left(self.left.values, self.left.counts)

    def note(self, error, trainer=None):
        """Write what has ended this rank, unless that is what the program asked for."""
        if isinstance(error, Killed) or self.left.error:
            return
        self.left.failed_at = time.time()
        self.left.error = "".join(traceback.format_exception(error))[-6000:]
        has_stepped = trainer is not None and trainer.global_step > self._started
        if not has_stepped and _is_raised_by_us(error):
            self.left.refusal = str(error)
        torch.save(self.left, self._left_file)

    def begin(self, trainer):
        """Keep at which step a trainer begins."""
        self._started = trainer.global_step

    def end(self):
        """Collect what is left at the end."""
        for number, trainer in enumerate(self._trainers):
            values = self.left.values
            values[f"metrics of trainer {number}"] = dict(trainer.callback_metrics)
            values[f"logged by trainer {number}"] = self._journals[number].entries
            self.left.counts.append(_count(trainer))
        self.left.values["seen in hooks"] = self._program.SEEN
        return self.left


def _Watch(run, number, lightning):
    class Watch(lightning.Callback):
        def _see(self, where, trainer):
            name = f"metrics of trainer {number} at {where}"
            run.left.values.setdefault(name, []).append(
                (trainer.current_epoch, trainer.global_step, dict(trainer.callback_metrics))
            )

        def on_train_start(self, trainer, module):
            run.begin(trainer)

        def on_train_epoch_end(self, trainer, module):
            self._see("an epoch's end", trainer)

        def on_validation_end(self, trainer, module):
            self._see("a validation's end", trainer)

    return Watch()


def _Kill(step, lightning):
    class Kill(lightning.Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step >= step:
                raise Killed

    return Kill()


def _is_raised_by_us(error):
    frames = traceback.extract_tb(error.__traceback__)
    is_ours = frames[-1].filename.startswith(PACKAGE) and "raise" in (frames[-1].line or "")
    is_explained = isinstance(error, ValueError | RuntimeError | TypeError) and " " in str(error)
    return is_ours and is_explained


def _count(trainer):
    if not isinstance(trainer.strategy, PipeOffloadStrategy):
        return None
    try:
        return trainer.strategy.plan.num_microbatches
    except Exception:  # it has trained nothing
        return None


def load(path):
    """Import a program's file anew."""
    spec = importlib.util.spec_from_file_location("generated_program", path)
    program = importlib.util.module_from_spec(spec)
    sys.modules["generated_program"] = program
    spec.loader.exec_module(program)
    return program


def run_ranks(path, folder, rank_file, limit):
    """Run it over the pipeline."""
    return _play(path, folder, rank_file, limit, None)


def run_reference(path, folder, rank_file, limit, counts, is_random):
    """Run it on one device, by the strategy or without, in so many microbatches."""
    sizes = {}

    def strategy(program, number):
        count = counts[number] or next(filter(None, counts), 1)
        if is_random:
            return PipeOffloadStrategy(schedule="1f1b", num_microbatches=count)
        return CutSteps(count, sizes)

    return _play(path, folder, rank_file, limit, strategy)


def _play(path, folder, rank_file, limit, make_reference):
    shutil.rmtree(folder, ignore_errors=True) if make_reference else None
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    # A rank that fails alone ends at once: its pool is of no more use.
    failure_board._OWN_ERROR_SECONDS = failure_board._SEEN_SECONDS = 5.0
    torch.set_default_dtype(torch.float32)
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(0)
    with open(f"{rank_file}.stacks", "w") as stacks:
        faulthandler.dump_traceback_later(limit, file=stacks)
        try:
            return _run(load(path), folder, f"{rank_file}.left", make_reference)
        finally:
            faulthandler.cancel_dump_traceback_later()
            logging.disable(logging.NOTSET)


def _run(program, folder, left_file, make_reference):
    def strategy(number):
        if make_reference:
            return make_reference(program, number)
        return PipeOffloadStrategy(**program.STRATEGY)

    devices = 1 if make_reference else program.DEVICES
    run = Run(program, folder, strategy, devices, left_file)
    try:
        program.play(run)
    except Exception as error:
        run.note(error)
        return run.left
    return run.end()
