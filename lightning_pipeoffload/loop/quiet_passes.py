"""What a step says to people and loggers, once for each microbatch.

``self.print``, ``print`` and ``self.logger.experiment.add_scalar`` would come from each run of a
step: a probe's, and that of every stage of a rank. They come from the one that gets farthest: of
the rank, or for what only global rank 0 may say of the model.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger


class QuietLogger:
    """A logger that logs nothing; all else about it is as it was.

    Args:
        logger: The user's logger.

    Attributes:
        experiment: One that does nothing.
    """

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
    """Silences ``self.print`` and the loggers of a module's trainer.

    Args:
        module: The module whose steps run.
    """

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
