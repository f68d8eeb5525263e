"""A callback that logs times and sizes of steps on every rank, and draws one next to its plan."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined] # exported at run time
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeoffload.callbacks.step_figures import (
    OptimizerStep,
    count_batch,
    figures_to_log,
)
from lightning_pipeoffload.metrics import RankFigures
from lightning_pipeoffload.pictures import (
    ENDINGS,
    MISSING,
    MeasuredStep,
    draw_measured,
    picture_path_error,
    save_figure,
    to_measured_trace,
)
from lightning_pipeoffload.planning.report import print_timeline_paths
from lightning_pipeoffload.runtime.device import ActionTimer, TimedStep
from lightning_pipeoffload.schedule import Costs, Schedule, seconds_text, share_text, simulate
from lightning_pipeoffload.strategy import PipeOffloadStrategy


class PipelineMonitor(Callback):
    """Logs figures of every ``log_every_n_steps``-th step, to all loggers, under ``pipeline/``.

    Of the whole run: ``step_seconds``, ``period_seconds`` (from a step's start to the next one's,
    less validation), ``bubble`` (the idle share of the period), ``samples_per_second``,
    ``tokens_per_second``, ``model_flops_per_second`` and ``grad_norm`` (before clipping). Of each
    rank, under ``rank_0/`` and so on in pipeline order: the first three, ``grad_norm`` of its own
    part, ``peak_activation_bytes`` (so far) and ``offloaded_bytes`` (by the step's last plan). With
    replicas, ranks are those of the first one, and what is per second counts all of them. No rank
    waits for any of it: a step's figures are logged some batches later, with that step's number.

    The operations of a batch are the module's ``flops_per_batch``, as for Lightning's
    ThroughputMonitor, or else the matrix products, convolutions and attention that were counted
    when the step was first traced, forward and backward, recomputation left out.

    Args:
        tokens: Returns the tokens of a batch: a number, or a tensor of one element; None: those
            where a batch's ``attention_mask`` is not 0, or else the size of its ``input_ids``.
        step: The step to draw, counted from 1; the ranks wait for each other once, at its end.
            Where batches accumulate, its last one is drawn.
        timeline: The file or files to draw it to, next to its plan: ``.svg``, ``.png`` (needs
            matplotlib), or ``.json``: a trace for https://ui.perfetto.dev.

    Raises:
        ValueError: A file ends otherwise, the step is no number from 1, or one of both is missing.
    """

    def __init__(
        self,
        tokens: Callable[[Any], Any] | None = None,
        step: int | None = None,
        timeline: str | PathLike[str] | Sequence[str | PathLike[str]] = (),
    ) -> None:
        self._files = _TimelineFiles(timeline)
        if (step is None) == bool(self._files.paths):
            raise ValueError(
                f"step ({step}) and timeline ({timeline}) of a PipelineMonitor need each other: "
                f"give the step to draw and the files to write, or neither"
            )
        if step is not None and (not isinstance(step, int) or step < 1):
            raise ValueError(f"step ({step}) of a PipelineMonitor must be a whole number from 1 on")
        self._tokens = tokens
        self._chosen = step
        self._has_drawn = False
        self._log_every = 0
        self._figures: RankFigures | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy = _strategy_of(trainer)
        if stage != "fit":
            return
        mine = (
            self._files.write_error() if trainer.is_global_zero else "",
            trainer.log_every_n_steps if trainer.loggers else 0,  # type: ignore[attr-defined] # set at run time
            self._chosen,
        )
        # The same answer on all ranks: a single rank that logs or draws would wait for ever.
        obstacle, self._log_every, self._chosen = strategy.broadcast(mine)
        if obstacle:
            raise ValueError(obstacle)
        self._has_drawn = self._has_drawn and trainer.global_step >= (self._chosen or 0)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = _strategy_of(trainer)
        self._timer = strategy.split.executor.timer
        self._seen = next(reversed(self._timer.kept_steps_after(None)), None)
        self._step = self._next_step(trainer.global_step)
        self._last: OptimizerStep | None = None
        self._waiting: deque[OptimizerStep] = deque()
        if self._log_every:
            index = trainer.callbacks.index(self)  # type: ignore[attr-defined] # set at run time
            self._figures = _open_rank_figures(strategy, f"monitor {index}")

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        group = _strategy_of(trainer).group
        is_counted = self._step.is_logged and group.is_root and not group.tensor_rank
        self._counts = count_batch(batch, self._tokens) if is_counted else {}

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        if self._step.is_logged:
            gradients = _strategy_of(trainer).split.pipeline.gradients
            counted = gradients.counted_gradients([*pl_module.parameters()]).values()
            self._step.figures["grad_norm"] = get_total_norm(map(_values_of, counted))

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        strategy = _strategy_of(trainer)
        self._end_last_period(strategy.split.executor.timer)
        self._collect_measured_plans()
        if self._counts:
            self._add_counts(strategy, pl_module)
        if trainer.global_step >= self._step.number:
            self._end_step(trainer, strategy)
        self._publish_ready_figures()
        self._log(trainer, strategy)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._collect_measured_plans()
            self._break_start = self._timer.now()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            step = self._step if self._last is None else self._last
            step.breaks.append((self._break_start, self._timer.now()))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._chosen is not None and not self._has_drawn:
            rank_zero_warn(
                f"PipelineMonitor has drawn no timeline: the fit ended after step "
                f"{trainer.global_step}, before step {self._chosen}; choose an earlier step"
            )
        if self._figures is not None:
            if self._last is not None:
                self._enqueue_for_logging(self._last)
            self._publish_ready_figures(wait=True)
            self._figures.close()
            self._log(trainer, _strategy_of(trainer))
            self._figures = None

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if self._figures is not None:
            self._figures.abandon()
            self._figures = None

    def _next_step(self, num_done: int) -> OptimizerStep:
        number = num_done + 1
        return OptimizerStep(number, bool(self._log_every) and number % self._log_every == 0)

    def _end_last_period(self, timer: ActionTimer) -> None:
        """End the last step's period: the next one has begun."""
        last, self._last = self._last, None
        if timer is not self._timer:  # the plan was made anew, which is no part of a step
            self._timer = timer
            (self._step if last is None else last).omit_period()
        if last is not None:
            last.end_period(self._first_plan(timer))
            self._enqueue_for_logging(last)

    def _first_plan(self, timer: ActionTimer) -> TimedStep:
        ended = timer.kept_steps_after(self._seen)
        return ended[0] if ended else timer.current_step

    def _enqueue_for_logging(self, step: OptimizerStep) -> None:
        if step.is_logged and step.plans:
            self._waiting.append(step)

    def _collect_measured_plans(self) -> None:
        """Add the plans that were measured since the last call."""
        for plan in self._timer.kept_steps_after(self._seen):
            self._seen = plan
            self._step.plans.append(plan)

    def _add_counts(self, strategy: PipeOffloadStrategy, module: LightningModule) -> None:
        traced = (m.record.work for m in strategy.split.executor.microbatches if m.has_result)
        flops = getattr(module, "flops_per_batch", None) or sum(w.training_flops for w in traced)
        counts = {"flops": flops} if flops else {}
        for name, number in (self._counts | counts).items():
            self._step.add(name, number)

    def _end_step(self, trainer: Trainer, strategy: PipeOffloadStrategy) -> None:
        step, self._step = self._step, self._next_step(trainer.global_step)
        self._last = step
        if step.is_logged:
            ledger = strategy.split.executor.memory.ledger
            step.figures["peak_activation_bytes"] = ledger.peak_device_bytes
            step.figures["offloaded_bytes"] = ledger.offloaded_bytes
        if step.number == self._chosen and step.plans:
            started = self._timer.now()
            self._draw(strategy, step)
            step.breaks.append((started, self._timer.now()))

    def _draw(self, strategy: PipeOffloadStrategy, step: OptimizerStep) -> None:
        self._has_drawn = True
        plan, measurements = strategy.split.executor.plan, strategy.split.measurements
        gathered = measurements.gather_step(step.plans[-1])
        costs = measurements.gather_costs(plan, may_copy=plan.has_copies)
        if gathered is not None and strategy.group.is_global_zero:
            measured, error = gathered
            written = self._files.write(step.number, measured, error, plan, costs)
            if written:
                print_timeline_paths(step.number, written, error)

    def _publish_ready_figures(self, wait: bool = False) -> None:
        """Send the figures that can be read; all if ``wait``."""
        while self._waiting and (wait or self._waiting[0].has_passed(self._timer)):
            step = self._waiting.popleft()
            assert self._figures is not None
            self._figures.publish(step.number, step.read(self._timer))

    def _log(self, trainer: Trainer, strategy: PipeOffloadStrategy) -> None:
        if self._figures is None or not trainer.is_global_zero:
            return
        for step, ranks in self._figures.arrived():
            group = strategy.group
            figures = figures_to_log(
                ranks, group.first_replica_ranks, strategy.split.pipeline.gradients.ranks
            )
            for logger in trainer.loggers:
                logger.log_metrics(metrics=figures, step=step - 1)  # as Lightning counts
                logger.save()


def _strategy_of(trainer: Trainer) -> PipeOffloadStrategy:
    strategy = trainer.strategy
    if not isinstance(strategy, PipeOffloadStrategy):
        raise ValueError(
            f"PipelineMonitor measures a pipeline, and the strategy is "
            f'{type(strategy).__name__}; use strategy="pipeoffload"'
        )
    return strategy


def _open_rank_figures(strategy: PipeOffloadStrategy, name: str) -> RankFigures:
    """Bring numbers to global rank 0: of replica 0, of roots, and of ranks with gradients."""
    group, store = strategy.group, strategy.processes.metrics_store
    return RankFigures(
        # A connection of its own: one that waits for metrics would hold it up.
        HashStore() if store is None else store.clone(),  # type: ignore[attr-defined] # at run time
        f"figures/{name}",
        strategy.global_rank,
        sorted(
            {*group.first_replica_ranks, *group.roots, *strategy.split.pipeline.gradients.ranks}
        ),
        strategy.processes.exit_for_thread_failure,
    )


def _values_of(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


class _TimelineFiles:
    """Pictures, and traces for Perfetto: ``.svg``, ``.png`` or ``.json`` files.

    Raises:
        ValueError: A path ends otherwise.
    """

    def __init__(self, paths: str | PathLike[str] | Sequence[str | PathLike[str]]) -> None:
        names = [paths] if isinstance(paths, (str, PathLike)) else paths
        self.paths = [Path(path) for path in names]
        for path in self.paths:
            if path.suffix not in ENDINGS:
                raise ValueError(
                    f"timeline ({path}) of a PipelineMonitor must end in .svg, .png or .json"
                )

    def write_error(self) -> str:
        """Say why a file cannot be written; empty if all can."""
        for path in self.paths:
            if obstacle := picture_path_error(path):
                advice = ", or use .json" if obstacle == MISSING else ""
                return (
                    f"timeline ({path}) of a PipelineMonitor cannot be written: {obstacle}{advice}"
                )
        return ""

    def write(
        self, number: int, measured: MeasuredStep, error: float, plan: Schedule, costs: Costs
    ) -> list[str]:
        """Draw a step next to its plan; warn of files that have become impossible.

        Args:
            number: The number of the step.
            measured: The times of its actions on all ranks.
            error: Seconds by which times of two ranks may be apart.
            plan: The plan that the ranks ran.
            costs: The costs of its actions, in seconds and bytes.

        Returns:
            The files that were written.
        """
        planned = simulate(plan, costs)
        titles = (
            f"Step {number} as measured: {plan.name}, "
            f"{_describe(measured.timeline.makespan, measured.bubble)}; "
            f"clocks compared to ±{1e6 * error:.0f} µs",
            f"Its plan, with the times that actions have taken: "
            f"{_describe(planned.makespan, planned.bubble)}",
        )
        written = []
        for path in self.paths:
            try:
                if path.suffix == ".json":
                    trace = to_measured_trace(measured, planned, costs)
                    path.write_text(json.dumps(trace), encoding="utf-8")
                else:
                    save_figure(draw_measured(measured, planned, costs, titles), path)
                written.append(str(path))
            except OSError as failure:  # training goes on without a picture
                rank_zero_warn(f"timeline ({path}) was not written: {failure.strerror or failure}")
        return written


def _describe(seconds: float, bubble: float) -> str:
    return f"{seconds_text(seconds)}, bubble {share_text(bubble)}; memory in MiB"
