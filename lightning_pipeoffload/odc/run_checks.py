"""Refuses what cannot be trained on demand, by name, before training."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn


def check_run(module: LightningModule, trainer: Trainer) -> None:
    """Refuse modules and trainers that would give wrong results, or wait for ever."""
    refuse_gradient_hooks(module.named_parameters())
    for name, part in module.named_modules():
        _check_layer(name, part)
    # Private: nothing else says so.
    if trainer._accelerator_connector._layer_sync is not None:
        raise ValueError(
            "sync_batchnorm=True waits for all ranks in every microbatch; leave it out"
        )
    if trainer.state.fn == TrainerFn.FITTING:
        _check_fit(module, trainer)


def refuse_gradient_hooks(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse hooks that FSDP2 would drop, or that would get a gradient before it is summed."""
    for name, parameter in parameters:
        # Private, both: where register_hook and register_post_accumulate_grad_hook keep hooks.
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"{name} has a hook on its gradient, which strategy='odc' sums up over the ranks "
                f"after the last backward, without calling hooks; change gradients in "
                f"on_before_optimizer_step, where they are whole"
            )


def _check_layer(name: str, part: nn.Module) -> None:
    if isinstance(part, nn.SyncBatchNorm):
        raise ValueError(
            f"{name} is a SyncBatchNorm, which waits for all ranks in every microbatch, and "
            f"ranks have different numbers of them; use a BatchNorm, or another norm"
        )
    if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
        raise ValueError(
            f"{name} makes sparse gradients, which FSDP2 does not shard; make it with sparse=False"
        )


def _check_fit(module: LightningModule, trainer: Trainer) -> None:
    if not module.automatic_optimization:
        raise ValueError(
            "manual optimization does not go with strategy='odc': training_step runs once for "
            "every microbatch, and ranks have different numbers of them; use automatic optimization"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            "training_step(self, dataloader_iter) does not go with strategy='odc', which calls it "
            "for every microbatch of a batch; use training_step(self, batch, batch_idx)"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined] # set at run time
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise ValueError(
                f"{type(callback).__name__} averages a copy of the module that was made before it "
                f"was sharded, and does not go with shards; keep averages of module.parameters(), "
                f"as they are in hooks, in a callback of your own: each rank averages its shards"
            )
