"""Modules, callbacks and flags that a pipeline refuses."""

from __future__ import annotations

import ast
import inspect
import textwrap
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_pipeoffload.loop.hooks import OF_GRADIENTS, users_hooks
from lightning_pipeoffload.runtime.cut import SKIP_A_BATCH
from lightning_pipeoffload.runtime.shapes import SHARDED
from lightning_pipeoffload.runtime.users_code import format_source_line, users_line

_STEP_OF = {
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}


def check_run(trainer: Trainer, num_replicas: int, num_tensor_ranks: int = 1) -> None:
    """Raise a ValueError for what would be wrong over a pipeline, with what to write instead."""
    refuse_unsupported_steps(trainer.lightning_module, trainer)
    for callback in trainer.callbacks:  # type: ignore[attr-defined] # set at run time
        if isinstance(callback, BatchSizeFinder) and trainer.world_size > 1:
            raise ValueError(
                "the batch size finder is not supported over several ranks, as with Lightning's "
                "distributed strategies: what fits depends on the plan, which a trial that runs "
                "out of memory would leave half done; use memory_limit, or devices=1"
            )
        if trainer.state.fn == TrainerFn.FITTING:
            _refuse_fit_callback(callback, trainer.lightning_module)
    refuse_sync_batch_norm(trainer, num_replicas)
    if num_tensor_ranks > 1 and not is_overridden("configure_model", trainer.lightning_module):
        raise ValueError(
            "tensor_parallel_size above 1 needs layers that are distributed: make them in "
            "configure_model, and call torch's parallelize_module there with "
            'self.device_mesh["tensor_parallel"] and a plan'
        )
    if trainer.state.fn == TrainerFn.FITTING:
        _warn_of_steps_without_loss(trainer.lightning_module)
    _warn_of_slow_bfloat16(trainer)


def _warn_of_steps_without_loss(module: LightningModule) -> None:
    """Warn of a ``return None``, by which a training step skips a batch on one device."""
    try:
        step = inspect.unwrap(module.training_step)
        lines, start = inspect.getsourcelines(step)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):  # no file, as of a function that a script has made
        return
    for node in _statements_of(tree.body[0]):
        if not isinstance(node, ast.Return):
            continue
        if node.value is None or ast.unparse(node.value) == "None":
            file = inspect.getsourcefile(step) or ""
            rank_zero_warn(
                f"training_step may return None "
                f"({format_source_line(file, start + node.lineno - 1)}): where it does, the run "
                f"ends, since the other stages wait for the batch's backward; return the loss, "
                f"{SKIP_A_BATCH}"
            )
            return


def _statements_of(function: ast.AST) -> Iterator[ast.AST]:
    """Yield what a function contains, without the functions in it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _statements_of(child)


def _warn_of_slow_bfloat16(trainer: Trainer) -> None:
    """Warn of a GPU that has no bfloat16, such as a T4, which torch imitates without an error."""
    device = trainer.strategy.root_device
    if device.type != "cuda" or not str(trainer.precision).startswith("bf16"):
        return
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        rank_zero_warn(f"{name} has no bfloat16, and emulates it slowly; use precision='16-mixed'")


@contextmanager
def refusing_several_optimizers() -> Iterator[None]:
    """Refuse several optimizers before Lightning advises manual optimization, refused as well."""
    try:
        yield
    except RuntimeError as error:
        if "multiple optimizers" not in str(error):
            raise
        raise ValueError(
            "configure_optimizers returned several optimizers, and one is stepped after each "
            "batch; give one optimizer several groups of parameters: torch.optim.AdamW(["
            '{"params": self.encoder.parameters(), "lr": 1e-4}, {"params": ...}])'
        ) from None


_SHARDING = {"parallelize_module", "distribute_module", "distribute_tensor", "fully_shard"}


@contextmanager
def refusing_sharded_layers(num_tensor_ranks: int) -> Iterator[None]:
    """Refuse layers that ``configure_model`` shards, where that fails without a value or a mesh."""
    try:
        yield
    except (TypeError, RuntimeError) as error:
        called = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        line = users_line(error)
        has_no_mesh = "device_mesh" in line and "NoneType" in str(error)
        if num_tensor_ranks > 1 or called.isdisjoint(_SHARDING) and not has_no_mesh:
            raise
        raise ValueError(f"configure_model shards layers ({line}), {SHARDED}") from None


def _refuse_fit_callback(callback: Callback, module: LightningModule) -> None:
    if isinstance(callback, ModelPruning):
        raise ValueError(
            "ModelPruning takes parameters out of the module, which is cut by their names, and "
            "compares weights of all its layers; prune the checkpoint after training instead"
        )
    swa = StochasticWeightAveraging
    if isinstance(callback, swa) and swa.pl_module_contains_batch_norm(module):
        raise ValueError(
            "StochasticWeightAveraging runs one more epoch without backwards where a module has "
            "BatchNorm, which cannot be pipelined; use WeightAveraging(), which averages the "
            "statistics with the weights, or another norm"
        )


def refuse_hooks_reading_shards(trainer: Trainer) -> None:
    """Refuse hooks that would take a shard of a weight or a gradient for the whole of it.

    Before ``configure_model``, which some of these callbacks call by themselves.
    """
    hooks = users_hooks(trainer, OF_GRADIENTS)
    if hooks:
        raise ValueError(
            f"{hooks[0]} may read gradients, of which each rank has a shard with "
            f"tensor_parallel_size above 1; leave the hook out, and clip with the Trainer's "
            f"gradient_clip_val"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined] # set at run time
        if isinstance(callback, StochasticWeightAveraging):
            raise ValueError(
                "StochasticWeightAveraging copies the module before configure_model makes its "
                "layers, as tensor_parallel_size above 1 needs; use EMAWeightAveraging()"
            )


def refuse_sync_batch_norm(trainer: Trainer, num_replicas: int) -> None:
    """Refuse ``sync_batchnorm`` where there is something to synchronize."""
    synchronizes = trainer._accelerator_connector._layer_sync is not None  # private: nothing else
    if synchronizes and num_replicas > 1:
        raise ValueError(
            f"sync_batchnorm=True is not built over data_parallel_size={num_replicas} replicas, "
            f"which would wait for each other in every microbatch's forward; leave it out, and "
            f"each replica has its own statistics, or use a norm of one sample such as GroupNorm"
        )


def refuse_unsupported_steps(module: LightningModule, trainer: Trainer) -> None:
    """Refuse steps that cannot be run stage by stage."""
    for step in _steps_of(trainer):
        if is_param_in_hook_signature(getattr(module, step), "dataloader_iter", explicit=True):
            raise ValueError(
                f"{step}(self, dataloader_iter) cannot be pipelined: each batch has to be cut into "
                f"microbatches; use {step}(self, batch, batch_idx)"
            )
    if trainer.state.fn == TrainerFn.FITTING and not module.automatic_optimization:
        raise ValueError(
            "manual optimization cannot be pipelined: training_step runs once for every stage and "
            "microbatch, an optimizer step inside it would run as often; use automatic optimization"
        )


def _steps_of(trainer: Trainer) -> list[str]:
    if trainer.state.fn in _STEP_OF:
        return [_STEP_OF[trainer.state.fn]]
    return ["training_step", "validation_step"] if trainer.enable_validation else ["training_step"]
