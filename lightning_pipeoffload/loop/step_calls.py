"""The module's steps as stages call them: on one microbatch, with ``self.log`` captured.

``print`` would print in each run of a step: in its trace, and in that of every stage of a rank. It
prints in the last stage of the rank; ``self.print`` and the loggers in the last stage of all.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor

from lightning_pipeoffload.loop.stops import JointStop
from lightning_pipeoffload.metrics import LogCapture, MicrobatchCapture, ignore_log
from lightning_pipeoffload.runtime import NOTHING, combine_contexts, map_output, mix_seed
from lightning_pipeoffload.runtime.batch import merge_outputs
from lightning_pipeoffload.runtime.shapes import unwrap_replicated
from lightning_pipeoffload.runtime.users_code import StepCall, UsersStep

_KINDS = ("training_step", "validation_step", "test_step", "predict_step")


@dataclass(frozen=True)
class StepInputs:
    """One batch to run.

    Attributes:
        kind: The kind of step ("training_step").
        batch: Any pytree.
        step: The user's step.
        seed: The seed of its random numbers.
        loader: The loader's number, where the step gets it.
    """

    kind: str
    batch: Any
    step: UsersStep
    seed: int
    loader: int = 0


@dataclass(frozen=True)
class StepOutput:
    """The outcome of a batch on this rank.

    Attributes:
        value: What the user's steps returned, merged; None without the last stage.
        sizes: The number of samples of each microbatch.
        shares: The share of each microbatch in means over the batch.
    """

    value: Any
    sizes: list[int]
    shares: Sequence[Any]

    @classmethod
    def of(cls, results: list[Any], sizes: list[int], shares: Sequence[Any]) -> StepOutput:
        """Merge what the steps have returned for each microbatch; None without the last stage."""
        value = merge_outputs(results, shares, sizes) if results else None
        return cls(value, sizes, shares)


class StepCalls:
    """The steps of one module, for a fit or an evaluation.

    Args:
        module: The module.
        seed: The seed of its steps.
        stop: Hears of each step that has come to its end; None: nothing does.
        tracing: Returns the context of a step's trace.
    """

    def __init__(
        self,
        module: LightningModule,
        seed: int,
        stop: JointStop | None = None,
        tracing: Callable[[], AbstractContextManager[Any]] = lambda: NOTHING,
    ) -> None:
        self._module = module
        self._seed = seed
        self._stop, self._tracing = stop, tracing
        self._capture = LogCapture(module)
        self._quiet = LogsQuiet(module)

    def inputs(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepInputs:
        """Return what to run for one batch, by the arguments that Lightning calls the step with."""
        batch, *rest = args
        plain = getattr(self._module, kind)

        def step(part: Any, call: StepCall) -> Any:
            around = combine_contexts(
                self._tracing() if call.is_trace else NOTHING,
                NOTHING if call.is_last else self._quiet,
                NOTHING if call.is_last_local else PrintQuiet(),
                MicrobatchCapture(self._capture, call.is_last)
                if call.is_last or call.is_trace
                else NOTHING,
            )
            with around:
                result = plain(part, *rest, **kwargs)
                if type(result) is not Tensor:  # as most steps return
                    result = self._capture.metrics.resolve_metric_values(result)
            if self._module.device_mesh is not None:
                result = map_output(unwrap_replicated, result)
            if self._stop is not None and not call.is_trace:
                self._stop.count_ended_step()
            return result

        trainer = self._module.trainer
        position = trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx, *rest
        seed = mix_seed(self._seed, _KINDS.index(kind), *position)
        return StepInputs(kind, batch, step, seed, *rest[1:])

    @property
    def metric_bytes(self) -> int:
        """Bytes that a microbatch keeps for metrics until the batch's end, by the last trace."""
        return self._capture.metrics.traced_bytes

    def log(self, sizes: Sequence[int], shares: Sequence[Any]) -> None:
        """Log once for the whole batch what its steps have logged; see :class:`StepOutput`."""
        self._capture.log_combined(sizes, shares)

    def pop_logged(self, sizes: Sequence[int], shares: Sequence[Any]) -> list[Tensor]:
        """Return the tensors that the steps have logged, and log none of them; see :meth:`log`."""
        return self._capture.pop_tensors(sizes, shares)


class QuietLogger:
    """Stands for a logger, with all of it but what logs."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self.experiment = DummyLogger().experiment

    @property  # type: ignore[misc] # nothing sets it
    def __class__(self) -> type[Any]:
        return type(self._logger)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._logger, name)
        return _ignore if name.startswith("log_") and callable(attribute) else attribute


class LogsQuiet:
    """Silences ``self.log``, ``self.print`` and the loggers of a module's trainer."""

    def __init__(self, module: LightningModule) -> None:
        self._attributes = module.__dict__
        self._trainer = module.trainer
        self._loggers: list[Logger] = []
        self._quiet: list[Any] = []

    def __enter__(self) -> None:
        if self._trainer.loggers != self._loggers:
            self._loggers = self._trainer.loggers
            self._quiet = [*map(QuietLogger, self._loggers)]
        if self._loggers:
            self._trainer.loggers = self._quiet
        self._attributes["print"], self._attributes["log"] = _ignore, ignore_log

    def __exit__(self, *error: object) -> None:
        del self._attributes["print"], self._attributes["log"]
        if self._loggers:
            self._trainer.loggers = self._loggers


class PrintQuiet:
    """Silences this thread's ``print``, unless it names a file, as debuggers do.

    Where the step fails, its output so far is printed.
    """

    def __enter__(self) -> None:
        self._printed: list[Callable[[], None]] = []
        self._plain = builtins.print
        self._thread = threading.get_ident()
        builtins.print = self._print

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        builtins.print = self._plain
        if kind is not None and issubclass(kind, Exception):
            for print_it in self._printed:
                print_it()

    def _print(self, *values: Any, **options: Any) -> None:
        if "file" in options or threading.get_ident() != self._thread:
            self._plain(*values, **options)
        else:
            self._printed.append(lambda: self._plain(*values, **options))


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Do nothing; replaces print and what logs."""
