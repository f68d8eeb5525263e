"""Hooks that use what steps returned or collected run where that is: with the last stage.

Every rank runs every hook, as under any strategy. But a step comes to its end on the rank of the
last stage only. On another rank a hook of the module or of a callback is left where it reads what
is not there: an attribute that the step has written, a metric that it has updated, outputs that are
no plain numbers. What such a hook logs arrives on all ranks::

    global rank 0    step: self.outputs.append(loss)   hook: log("mean", mean(self.outputs))
    another rank     step: leaves before that line     hook: leaves at self.outputs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torchmetrics import Metric

from lightning_pipeoffload.loop.hooks.outputs_elsewhere import ElsewhereError, OutputsElsewhere
from lightning_pipeoffload.loop.hooks.users_hooks import (
    is_users_hook,
    owners_of_hooks,
    refuse_others,
)
from lightning_pipeoffload.loop.hooks.wrapped_hook import WrappedHook
from lightning_pipeoffload.loop.hooks.written_attributes import (
    WrittenAttributes,
    attributes_watched,
)
from lightning_pipeoffload.metrics.shared_metrics import SharedMetricsConnector

_KINDS = ("train", "validation", "test", "predict")
_BATCH_END = tuple(f"on_{kind}_batch_end" for kind in _KINDS)
_EPOCH_END = (
    *(f"on_{kind}_epoch_end" for kind in _KINDS),
    *(f"on_{kind}_end" for kind in (*_KINDS, "fit")),
)
_OF_LIGHTNING = frozenset(vars(LightningModule())) | {"log"}


class EndHooks:
    """The hooks of a module and of a trainer's callbacks that may use what steps collected.

    Args:
        trainer: The trainer whose module and callbacks have the hooks.
        connector: What tells the other ranks what was written on global rank 0.

    Attributes:
        left: On global rank 0, where the other ranks have left the hook that it is running; empty
            if they have not.
    """

    def __init__(self, trainer: Trainer, connector: SharedMetricsConnector) -> None:
        self._module = trainer.lightning_module
        self._connector = connector
        self._is_root = connector.is_root
        self._owners = _owners_of_end_hooks(trainer)
        self._written = [
            WrittenAttributes(owner, _OF_LIGHTNING if owner is self._module else frozenset())
            for owner in self._owners
        ]
        self._metrics = [m for m in self._module.modules() if isinstance(m, Metric)]
        self._wrapped: list[WrappedHook] = []
        self._known: set[str] = set()
        self.left = ""
        self._wrap_all()
        connector.describe = lambda: [sorted(written.names) for written in self._written]

    def watching_step(self) -> AbstractContextManager[None]:
        """Note what the module's step writes."""
        return self._written[0].watching() if len(self._wrapped) > 1 else nullcontext()

    def remove(self) -> None:
        """Give the module and the callbacks their own hooks back."""
        for wrapped in self._wrapped:
            wrapped.remove()
        self._wrapped.clear()
        del self._connector.describe

    def _wrap_all(self) -> None:
        # Not overridden maybe, but after it callbacks decide on what other callbacks have logged.
        hooks = {(0, "on_train_epoch_end")}
        for place, owner in enumerate(self._owners):
            hooks |= {(place, hook) for hook in _users_end_hooks(owner)}
        for place, hook in hooks:
            self._wrap(place, hook)

    def _wrap(self, place: int, hook: str) -> None:
        run = self._run_at_batch_end if hook in _BATCH_END else self._run_at_epoch_end

        def watched(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            try:
                return run(place, hook, lambda *given: plain(*given, **kwargs), args)
            except ElsewhereError:
                return None

        self._wrapped.append(WrappedHook(self._owners[place], hook, watched))

    def _run_at_batch_end(
        self, place: int, hook: str, plain: Callable[..., Any], args: tuple[Any, ...]
    ) -> Any:
        with self._written[place].watching():
            if self._is_root:
                return plain(*args)
            # What was written once is known from then on without waiting.
            news = self._connector.news(wait=f"{place} {hook}" not in self._known)
            self._known.add(f"{place} {hook}")
            index = 0 if place == 0 else 2  # a callback's comes after trainer and module
            outputs = OutputsElsewhere(self._connector.outputs)
            with self._missing_watched(place, news):
                return plain(*args[:index], outputs, *args[index + 1 :])

    def _run_at_epoch_end(
        self, place: int, hook: str, plain: Callable[..., Any], args: tuple[Any, ...]
    ) -> Any:
        try:
            if self._is_root:
                with self._own_watched(place, hook):
                    return plain(*args)
            with self._missing_watched(place, self._connector.news()):
                return plain(*args)
        finally:
            self.left = ""
            self._connector.tick()

    @contextmanager
    def _own_watched(self, place: int, hook: str) -> Iterator[None]:
        """On global rank 0, see where the other ranks leave the hook."""

        def note(name: str) -> None:
            self.left = self.left or f"{hook} where it reads {name}"

        with ExitStack() as stack:
            for owner in {0, place}:
                names = self._written[owner].names
                stack.enter_context(attributes_watched(self._owners[owner], names, note))
            yield

    @contextmanager
    def _missing_watched(self, place: int, news: list[list[str]] | None) -> Iterator[None]:
        """On the other ranks, leave the hook at the use of what is not there."""
        with ExitStack() as stack:
            for owner in {0, place}:
                missing = set(news[owner] if news else ()) - self._written[owner].names
                if missing:
                    stack.enter_context(attributes_watched(self._owners[owner], missing, _leave))
            stack.enter_context(self._metrics_watched())
            yield

    @contextmanager
    def _metrics_watched(self) -> Iterator[None]:
        missing = [metric for metric in self._metrics if not metric.update_called]
        plain = [metric.__dict__["compute"] for metric in missing]
        for metric in missing:
            metric.__dict__["compute"] = _leave
        log = WrappedHook(self._module, "log", _log)
        try:
            yield
        finally:
            log.remove()
            for metric, compute in zip(missing, plain, strict=True):
                metric.__dict__["compute"] = compute


def _log(plain: Callable[..., Any], name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    if isinstance(value, Metric) and not value.update_called:
        raise ElsewhereError
    plain(name, value, *args, **kwargs)


def _leave(*args: Any) -> None:
    raise ElsewhereError


def refuse_other_callbacks(trainer: Trainer) -> None:
    """Refuse callbacks that are not those of global rank 0; all ranks call it.

    Raises:
        ValueError: This rank has others; it raises there alone.
    """
    mine = [type(owner).__qualname__ for owner in _owners_of_end_hooks(trainer)]
    refuse_others(
        trainer, mine, "run hooks at the end of batches and epochs together, in one order"
    )


def _owners_of_end_hooks(trainer: Trainer) -> list[Any]:
    """Return the module, and the callbacks whose hooks have to be watched."""
    module, *callbacks = owners_of_hooks(trainer)
    return [module, *(callback for callback in callbacks if _users_end_hooks(callback))]


def _users_end_hooks(owner: object) -> list[str]:
    return [hook for hook in (*_BATCH_END, *_EPOCH_END) if is_users_hook(owner, hook)]
