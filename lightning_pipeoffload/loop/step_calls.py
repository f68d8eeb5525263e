"""The module's steps as stages call them: on one microbatch, with ``self.log`` taken aside.

``self.print``, ``print`` and ``self.logger.experiment.add_scalar`` would come from each run of a
step: a probe's, and that of every stage of a rank. They come from the one that gets farthest: of
the rank, or for what only global rank 0 may say of the model.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_pipeoffload.metrics.log_capture import LogCapture
from lightning_pipeoffload.runtime.randomness import mix_seed
from lightning_pipeoffload.runtime.users_code.step_call import StepCall, UsersStep

_KINDS = ("training_step", "validation_step", "test_step", "predict_step")


@dataclass(frozen=True)
class StepInputs:
    """One batch to run: the kind of step ("training_step"), any pytree, the step, its seed."""

    kind: str
    batch: Any
    step: UsersStep
    seed: int


@dataclass(frozen=True)
class StepOutput:
    """What a batch gave on this rank.

    Attributes:
        value: What the user's steps returned, put together; None without the last stage.
        sizes: The number of samples of each microbatch.
        shares: The share of each in means over the batch.
    """

    value: Any
    sizes: list[int]
    shares: Sequence[Any]


class StepCalls:
    """The steps of one module, for a fit or an evaluation.

    Attributes:
        is_probing: Whether a step is looked at right now.
        end_step: A function that is called when a step has come to its end, which it does on the
            last stage.
    """

    def __init__(self, module: LightningModule, seed: int) -> None:
        self._module = module
        self._seed = seed
        self._capture = LogCapture(module)
        self.end_step: Callable[[], None] = lambda: None
        self.is_probing = False

    def inputs(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepInputs:
        """Say what to run for one batch, by the arguments that Lightning calls the step with."""
        batch, *rest = args
        plain = getattr(self._module, kind)

        def step(part: Any, call: StepCall) -> Any:
            loggers_quiet = nullcontext() if call.is_last else LoggersQuiet(self._module)
            print_quiet = nullcontext() if call.is_last_local else PrintQuiet()
            capturing = self._capture.capturing(call.is_last, call.is_probe)
            self.is_probing = call.is_probe
            try:
                with loggers_quiet, print_quiet, capturing:
                    result = plain(part, *rest, **kwargs)
            finally:
                self.is_probing = False
            if not call.is_probe:
                self.end_step()
            return result

        trainer = self._module.trainer
        position = trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx, *rest
        return StepInputs(kind, batch, step, mix_seed(self._seed, _KINDS.index(kind), *position))

    def log(self, sizes: Sequence[int], shares: Sequence[Any]) -> None:
        """Log what the step has logged, once for the whole batch.

        Args:
            sizes: The number of samples of each microbatch.
            shares: The share of each in means over the batch.
        """
        self._capture.replay(sizes, shares)


class QuietLogger:
    """A logger that logs nothing; all else about it is as it was."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self.experiment = DummyLogger().experiment

    @property  # type: ignore[misc] # it is asked for only
    def __class__(self) -> type[Any]:
        return type(self._logger)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._logger, name)
        return _ignore if name.startswith("log_") and callable(found) else found


class LoggersQuiet:
    """Silences ``self.print`` and the loggers of a module's trainer."""

    def __init__(self, module: LightningModule) -> None:
        self._attributes = module.__dict__
        self._trainer = module.trainer

    def __enter__(self) -> None:
        self._loggers = self._trainer.loggers
        if self._loggers:
            self._trainer.loggers = [QuietLogger(logger) for logger in self._loggers]  # type: ignore[misc]
        self._attributes["print"] = _ignore

    def __exit__(self, *error: object) -> None:
        del self._attributes["print"]
        if self._loggers:
            self._trainer.loggers = self._loggers


class PrintQuiet:
    """Silences this thread's ``print``, but not of who names a file, as debuggers do.

    A step that fails says what it has printed so far.
    """

    def __enter__(self) -> None:
        self._said: list[Callable[[], None]] = []
        self._plain = builtins.print
        self._thread = threading.get_ident()
        builtins.print = self._print

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        builtins.print = self._plain
        if kind is not None and issubclass(kind, Exception):
            for say in self._said:
                say()

    def _print(self, *values: Any, **options: Any) -> None:
        if "file" in options or threading.get_ident() != self._thread:
            self._plain(*values, **options)
        else:
            self._said.append(lambda: self._plain(*values, **options))


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Say nothing."""
