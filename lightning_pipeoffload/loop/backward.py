"""From a batch's loss to the gradients of its step: hooks, backwards, clipping and the loss scale.

Forwards and backwards of a pipeline interleave. What Lightning does before its one backward happens
before the first B of a plan, and what it does after it happens after the last::

    F F F [zero_grad, on_before_backward] B F B F B B [sums, on_after_backward] | clip, step
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode  # private: its documented home

from lightning_pipeoffload.loop.hooks import CollectedValues, users_hooks
from lightning_pipeoffload.loop.post_validation import Clipping, LossScaling, PostValidation
from lightning_pipeoffload.planning.training_plan import Accumulation
from lightning_pipeoffload.runtime import tensors_in
from lightning_pipeoffload.runtime.run import Pipeline
from lightning_pipeoffload.runtime.shapes import storage_key, written_arguments

_BEFORE_BACKWARD = "optimizer_zero_grad", "on_before_zero_grad", "on_before_backward"


class WrittenMemory(TorchDispatchMode):
    """Collects in ``written`` the memory that operations inside write."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = tensors_in([*written_arguments(func, args, kwargs or {})])
        self.written.update(map(storage_key, tensors))
        return result


def scaler_of(precision: Precision) -> GradScaler | None:
    return getattr(precision, "scaler", None)


class BackwardHooks:
    """Runs zero_grad and the hooks around a batch, and each microbatch's own backward within.

    Attributes:
        adds_up: Whether the next batch's gradients add up to those that are there.
    """

    def __init__(self, module: LightningModule, precision: Precision, device: torch.device) -> None:
        self._module, self._precision, self._device = module, precision, device
        self._scaler = scaler_of(precision)
        self._zero_grad: Callable[[], None] | None = None
        self.adds_up = True

    def set_zero_grad(self, zero_grad: Callable[[], None] | None) -> None:
        """Store Lightning's ``zero_grad`` call for the batch; None while gradients accumulate."""
        self._zero_grad = zero_grad
        self.adds_up = zero_grad is None

    def differentiate(self, loss: Tensor) -> None:
        """Run the backward of one microbatch's loss."""
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        self._precision.backward(loss, self._module, None)

    def _run_zero_grad(self) -> None:
        if self._zero_grad is not None:
            self._zero_grad()

    def _run_pre_backward(self, loss: Tensor | None) -> None:
        self._precision.pre_backward(self._loss_or_zero(loss), self._module)

    def _loss_or_zero(self, loss: Tensor | None) -> Tensor:
        """Return the loss for hooks; zero on a rank without one."""
        return torch.zeros((), device=self._device) if loss is None else loss


class BatchBackward(BackwardHooks):
    """The hooks before and after all the backwards of a batch of the pipeline."""

    def __init__(
        self,
        module: LightningModule,
        precision: Precision,
        pipeline: Pipeline,
        collected: CollectedValues | None,
    ) -> None:
        super().__init__(module, precision, pipeline.device)
        self._pipeline, self._group, self._collected = pipeline, pipeline.group, collected
        self._is_summed = False

    def run_pre_backward_hooks(self, results: Sequence[Any]) -> None:
        """Run Lightning's hooks between a training step and its backward.

        Args:
            results: What steps have returned on this rank by then.
        """
        with self._between_steps(), self._refusing_writes():
            self._run_zero_grad()
            self._run_pre_backward(_loss_of(results[-1]) if results else None)
        if self._is_summed:
            self._pipeline.gradients.prevent_double_counting()
            self._is_summed = False

    def _between_steps(self) -> AbstractContextManager[None]:
        if self._collected is None or not self._runs_hooks:
            return nullcontext()
        return self._collected.between_steps()

    @contextmanager
    def _refusing_writes(self) -> Iterator[None]:
        """Refuse hooks that write weights of the step before its first backward.

        Which microbatches have used the old values by then depends on the plan. Where one alone
        has run, as with one stage, all is as on one device.
        """
        stages = self._pipeline.stages.values() if self._runs_hooks else ()
        flights = [[*stage.in_flight.values()] for stage in stages]
        if max(map(len, flights), default=0) < 2:
            yield
            return
        records = {f.microbatch.record for of_stage in flights for f in of_stage}
        used = {name for record in records for name in record.segments}
        local = self._pipeline.tensors.local_tensors()
        before = {name: storage_key(local[name]) for name in sorted(used & local.keys())}
        with WrittenMemory() as writes:
            yield
        now = self._pipeline.tensors.local_tensors()
        for name, memory in before.items():
            if memory in writes.written or storage_key(now[name]) != memory:
                raise ValueError(
                    f"{' or '.join(_BEFORE_BACKWARD)} writes {name}, which some microbatches of "
                    f"the batch have used and others will use: write it in on_train_batch_end or "
                    f"on_train_batch_start"
                )

    @cached_property
    def _runs_hooks(self) -> bool:
        return bool(users_hooks(self._module.trainer, _BEFORE_BACKWARD))

    def run_post_backward_hooks(self, output: Any, accumulation: Accumulation) -> Any:
        """Do what Lightning does after a backward; return the output, or a zero for the loss."""
        if accumulation.is_last or accumulation.gradient_hooks:
            self._pipeline.sum_stage_gradients()
            self._pipeline.gradients.sum_shared_gradients()
            self._is_summed = True
        self._pipeline.gradient_changes.record()
        output = self._loss_or_zero(None) if output is None else output
        self._precision.post_backward(self._loss_or_zero(_loss_of(output)), self._module)
        return output


def _loss_of(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) else None


class GradientClipper:
    """Clips by the norm over all ranks, and skips a step whose gradients overflow on any.

    The norm of each gradient is squared, and all ranks sum these in the order of the optimizer's
    parameters, so its bits do not depend on which rank has which.
    """

    def __init__(
        self, precision: Precision, pipeline: Pipeline, validation: PostValidation
    ) -> None:
        self._precision, self._validation = precision, validation
        self._gradients, self._changes = pipeline.gradients, pipeline.gradient_changes
        self._device = pipeline.device

    def clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip by the norm over all ranks, tied weights counted once."""
        parameters = [*self._precision.main_params(optimizer)]
        squares = self._squared_norms(parameters)
        own = [p for p in self._gradients.with_local_gradient(parameters) if p.grad is not None]
        clipping = Clipping(own, clip_val, squares)
        if self._validation.assumes_no_clipping():
            self._validation.defer_clipping(clipping)
            return
        clipping.clip(clipping.norm(self._gradients.sum_over_ranks(squares)))
        self._changes.record()

    def clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        own = self._gradients.with_local_gradient([*self._precision.main_params(optimizer)])
        parameters = [p for p in own if p.grad is not None]
        if parameters:  # else torch's kernel for many would fail
            nn.utils.clip_grad_value_(parameters, clip_val)
        self._changes.record()

    def _squared_norms(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return those of the gradients that this rank counts, in float64; 0 for the others."""
        counted = self._gradients.counted_gradients(parameters)
        if not counted:
            return torch.zeros(len(parameters), dtype=torch.float64, device=self._device)
        # Private: as torch's own clipping, one kernel for many.
        norms = dict(zip(counted, torch._foreach_norm([*counted.values()]), strict=True))
        none = torch.zeros_like(next(iter(norms.values())))
        return torch.stack([norms.get(i, none) for i in range(len(parameters))]).double() ** 2

    def unscale(
        self,
        scaler: GradScaler,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[Any, Tensor]:
        """Unscale this rank's gradients, as the scaler does; return whether any rank overflows."""
        members = [p for g in optimizer.param_groups for p in g["params"]]
        parameters = self._gradients.with_local_gradient(members)
        stepped: Any = SimpleNamespace(param_groups=[{"params": parameters}])
        by_device = type(scaler)._unscale_grads_(scaler, stepped, inv_scale, found_inf, allow_fp16)
        self._changes.record()
        # A rank whose parameters are frozen has looked at nothing.
        overflow = by_device.get(found_inf.device, found_inf)
        if self._validation.steps_before_validation():
            self._validation.defer_overflow_check(_scaling(scaler, overflow))
            return {found_inf.device: overflow}
        return {found_inf.device: self._gradients.max_over_ranks(overflow)}


def _scaling(scaler: GradScaler, overflow: Tensor) -> LossScaling:
    """Return how a scale goes on, by the numbers that it has now."""
    # Private: the scale, and how many steps in a row it was not too large.
    scale, growth = scaler._scale, scaler._growth_tracker
    assert scale is not None
    assert growth is not None
    return LossScaling(
        overflow, partial(_lower, scaler, scale.clone(), growth.clone()), (scale, growth)
    )


def _lower(scaler: GradScaler, scale: Tensor, growth: Tensor) -> None:
    """Lower the scale that there was before the step."""
    current: Any = scaler._scale
    current_growth: Any = scaler._growth_tracker
    current.copy_(scale)
    current_growth.copy_(growth)
    factors = scaler.get_growth_factor(), scaler.get_backoff_factor()
    # Private: what the scaler itself calls at the end of a step.
    torch._amp_update_scale_(
        current, current_growth, torch.ones_like(scale), *factors, scaler.get_growth_interval()
    )
