"""Lightning's steps, run as plans of the pipeline, and what Lightning does around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeoffload.loop.compilation import compile_ahead
from lightning_pipeoffload.loop.hooks.elsewhere import numbers_in
from lightning_pipeoffload.loop.hooks.users_hooks import hooks_between_batches
from lightning_pipeoffload.loop.later_steps import LaterSteps
from lightning_pipeoffload.loop.run_setup import RunSetup
from lightning_pipeoffload.loop.step_barrier import clips_by_norm, may_step_ahead
from lightning_pipeoffload.loop.step_border import StepBorder
from lightning_pipeoffload.loop.step_inputs import StepOutput
from lightning_pipeoffload.loop.weights_watch import WeightsWatch, may_travel
from lightning_pipeoffload.optimizers.kept_step import KeptStep
from lightning_pipeoffload.planning.accumulation import Accumulation
from lightning_pipeoffload.runtime.randomness import forked_randomness
from lightning_pipeoffload.runtime.step.autocast import sharing_casts
from lightning_pipeoffload.runtime.users_code.no_trace import (
    has_forward_hooks,
    without_forward_hooks,
)


class StepHooks(LaterSteps, RunSetup):
    """Runs a batch of each kind where Lightning would call the module's step."""

    _weights_watch: WeightsWatch | None = None
    _has_forward_hooks = False

    @override
    def on_train_start(self) -> None:
        self._parameters.start_training()
        border, under_way = self._step_border, self.group.replicas.under_way
        under_way.may_wait = may_travel(self._trainer)
        self._weights_watch = WeightsWatch(under_way, border.weights)
        self.run.pipeline.before_look = self.settle_weights
        self._open_border()

    def _open_border(self) -> None:
        if self.settings.optimizer_sync == "barrier" or self.group.num_ranks == 1:
            return
        may_open = may_step_ahead(self._trainer, self.group.reports)
        if self.group.world.agree(may_open, unanimous=True):
            border = self._step_border
            border.open_for(KeptStep(self._trainer.optimizers[0]), self._is_clipping)
            border.clips = partial(clips_by_norm, self._trainer)
            self.run.report.keeps_steps = lambda: border.keeps_copies
            found = has_forward_hooks(self._module)
            self._has_forward_hooks = self.group.world.agree(found, unanimous=False)

    def _is_clipping(self) -> bool:
        """Whether Lightning clips, as the last thing before the step; hooks may have before."""
        # Private: no public name tells the hook that runs.
        return self._trainer.lightning_module._current_fx_name == "configure_gradient_clipping"

    @property
    def _step_border(self) -> StepBorder:
        assert self._border is not None
        return self._border

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        self._num_steps += 1
        self.stop_watching_weights()  # which the optimizer's own hooks read
        output = super().optimizer_step(optimizer, closure, *args, **kwargs)
        self._step_border.end_step()
        if self._weights_watch is not None:
            self._weights_watch.start()
        return output

    def stop_watching_weights(self) -> None:
        """Let the next step wait for weights that are not final yet."""
        if self._weights_watch is not None:
            self._weights_watch.stop()

    @override
    def settle_weights(self) -> None:
        self.stop_watching_weights()
        super().settle_weights()
        if self._border is not None:
            self._border.weights.settle()

    def settle_together(self) -> None:
        """Have all weights, where all ranks pass."""
        self.settle_weights()
        self._step_border.settle()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.stop_watching_weights()
        backward = self.backward_of_batch
        with self.precision_plugin.train_step_context(), self._between_hooks("training_step"):
            inputs = self._steps.inputs("training_step", args, kwargs)
            slices = self.run.cut_training_batch(inputs)
            accumulation = self._accumulation()
            if not self.run.pipeline.committed:
                self.run.report.estimate_memory(slices[0], self.optimizers)
                self._parameters.leave_foreign()
                self._leave_copies()
                self.run.begin_training(accumulation)
                compile_ahead(self.run.pipeline, self.group)
            self._start_batch(len(slices), accumulation)
            with self._start_ahead(), sharing_casts(self.root_device), self._counted():
                self._first_batches.start_step()
                start, differentiate = self._start_backward, backward.differentiate
                done = self.run.train(inputs, slices, accumulation, start, differentiate)
            self._log(done, self._trainer.accumulate_grad_batches)
        return backward.end(done.value, accumulation)

    def _start_backward(self, results: Sequence[Any]) -> None:
        """Run the hooks before a backward, in the middle of a plan."""
        with nullcontext() if self._collected is None else self._collected.between_steps():
            self.backward_of_batch.start(results)

    def _start_ahead(self) -> ExitStack:
        """Begin before the weights are final, if what runs can be taken back."""
        border, executor, muted = self._step_border, self.run.executor, ExitStack()
        executor.settle = None
        if not border.is_open:
            return muted
        if self.run.pipeline.leaves_trace or self._has_forward_hooks:
            border.settle()
        elif not has_forward_hooks(self._module):
            executor.settle = border.settle
        elif border.settle():  # other ranks may have no hooks, and send what they take back
            muted.enter_context(without_forward_hooks(self._module))
            executor.settle = partial(self._begin_again, muted)
        return muted

    def _begin_again(self, muted: ExitStack) -> bool:
        muted.close()
        return True

    def _start_batch(self, num_microbatches: int, accumulation: Accumulation) -> None:
        if self._stop is not None:
            self._stop.start_batch(
                num_microbatches, accumulation.is_last or bool(accumulation.watched_by)
            )

    def _counted(self) -> AbstractContextManager[None]:
        return nullcontext() if self._arrivals is None else self._arrivals.batch()

    def arrive(self) -> None:
        """Pass a place to which all ranks come after as many batches."""
        if self._arrivals is not None:
            self._arrivals.arrive()

    def settle(self) -> None:
        """Let all ranks stop if one of them has set ``trainer.should_stop``; they wait here."""
        self.arrive()
        if self._stop is not None:
            self._stop.settle()

    def _accumulation(self) -> Accumulation:
        num_batches = self._trainer.accumulate_grad_batches
        return Accumulation(
            num_batches,
            is_first=not self.backward_of_batch.adds_up,
            is_last=not self._steps_later,
            watched_by=hooks_between_batches(self._trainer) if num_batches > 1 else (),
        )

    def finish_accumulating(self) -> None:
        """Run the backwards that are left of batches whose optimizer step is still to come."""
        with self.precision_plugin.train_step_context(), self._between_hooks():
            self.run.finish_plan()

    @contextmanager
    def _between_hooks(self, kind: str = "") -> Iterator[None]:
        """Run steps, which leave random numbers as they were, and call modules of their own."""
        forwards = nullcontext() if self._hook_forwards is None else self._hook_forwards.paused()
        collected = nullcontext() if self._collected is None else self._collected.in_step(kind)
        with forwards, forked_randomness(), collected:
            yield

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._evaluate("validation_step", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._evaluate("test_step", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._trainer.received_sigterm:  # of Lightning's loops this one does not ask
            raise SIGTERMException
        with self.precision_plugin.predict_step_context():
            return self._evaluate("predict_step", args, kwargs)

    def _evaluate(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._between_hooks(kind), self._counted():
            done = self.run.evaluate(self._steps.inputs(kind, args, kwargs))
            self._log(done)
        return done.value if self._collected is None else self._collected.outputs(kind, done.value)

    def _log(self, done: StepOutput, num_accumulated: int = 1) -> None:
        self._steps.log(done.sizes, done.shares)
        numbers = numbers_in(done.value)
        if "loss" in numbers:
            numbers["loss"] = numbers["loss"] / num_accumulated  # as Lightning gives it to hooks
        self._connector.tick(outputs=numbers)

    @override
    def on_train_end(self) -> None:
        self.finish_accumulating()  # where training has stopped in between
        self.run.finish_checking()
        self.run.report.print_end()
        if self._requeue is not None:
            self._requeue.end_training(self.group)

    @override
    def on_validation_end(self) -> None:
        if self._trainer.state.fn != TrainerFn.FITTING:  # there the next batch of training does it
            self.run.finish_checking()

    @override
    def on_test_end(self) -> None:
        self.run.finish_checking()

    @override
    def on_predict_end(self) -> None:
        self.run.finish_checking()

    @override
    def teardown(self) -> None:
        self.stop_watching_weights()  # after an error; its hooks may have read them
        super().teardown()
