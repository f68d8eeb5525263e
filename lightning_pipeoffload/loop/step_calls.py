"""The module's steps as stages call them: on one microbatch, with ``self.log`` taken aside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule

from lightning_pipeoffload.loop.quiet_passes import LoggersQuiet, PrintQuiet
from lightning_pipeoffload.loop.step_inputs import StepInputs
from lightning_pipeoffload.metrics.log_capture import LogCapture
from lightning_pipeoffload.runtime.randomness import mix_seed
from lightning_pipeoffload.runtime.users_code.step_call import StepCall

_KINDS = ("training_step", "validation_step", "test_step", "predict_step")


class StepCalls:
    """The steps of one module, for a fit or an evaluation.

    Args:
        module: The user's module, which has a trainer.
        seed: The seed of the fit, the same on every rank.

    Attributes:
        watching: A function that makes the context in which each call of a step that computes runs.
        is_probing: Whether a step is looked at right now.
        end_step: A function that is called when a step has come to its end, which it does on the
            last stage.
    """

    def __init__(self, module: LightningModule, seed: int) -> None:
        self._module = module
        self._seed = seed
        self._capture = LogCapture(module)
        self.watching: Callable[[], AbstractContextManager[None]] = nullcontext
        self.end_step: Callable[[], None] = lambda: None
        self.is_probing = False

    def inputs(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepInputs:
        """Say what to run for one batch.

        Args:
            kind: The name of the step.
            args: The arguments that Lightning calls it with: the batch, and after it indices.
            kwargs: The keyword arguments that Lightning calls it with.
        """
        batch, *rest = args
        plain = getattr(self._module, kind)

        def step(part: Any, call: StepCall) -> Any:
            capturing = self._capture.capturing(call.is_last, call.is_probe)
            watching = nullcontext() if call.is_probe else self.watching()
            self.is_probing = call.is_probe
            try:
                with self._loggers_quiet(call), _print_quiet(call), capturing, watching:
                    result = plain(part, *rest, **kwargs)
            finally:
                self.is_probing = False
            if not call.is_probe:
                self.end_step()
            return result

        trainer = self._module.trainer
        position = trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx, *rest
        return StepInputs(kind, batch, step, mix_seed(self._seed, _KINDS.index(kind), *position))

    def _loggers_quiet(self, call: StepCall) -> AbstractContextManager[None]:
        return nullcontext() if call.is_last else LoggersQuiet(self._module)

    def log(self, sizes: Sequence[int], shares: Sequence[Any]) -> None:
        """Log what the step has logged, once for the whole batch.

        Args:
            sizes: The number of samples of each microbatch.
            shares: The share of each in means over the batch.
        """
        self._capture.replay(sizes, shares)


def _print_quiet(call: StepCall) -> AbstractContextManager[None]:
    return nullcontext() if call.is_last_local else PrintQuiet()
