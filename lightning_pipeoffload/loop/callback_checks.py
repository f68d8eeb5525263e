"""Callbacks, profilers and flags that cannot do over a pipeline what they do elsewhere."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.trainer.states import TrainerFn


def check_callbacks(trainer: Trainer) -> None:
    """Refuse callbacks that would be wrong.

    Raises:
        ValueError: There is one; the message says which, why, and what would do.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined] # set at run time
        if isinstance(callback, BatchSizeFinder) and trainer.world_size > 1:
            raise ValueError(
                "the batch size finder is not supported over several ranks, as with Lightning's "
                "distributed strategies: what fits depends on the plan, which a trial that runs "
                "out of memory would leave half done; use memory_limit, or devices=1"
            )
        if trainer.state.fn == TrainerFn.FITTING:
            _check_of_fit(callback, trainer.lightning_module)


def _check_of_fit(callback: Callback, module: LightningModule) -> None:
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


def refuse_synchronized_norms(trainer: Trainer, num_replicas: int) -> None:
    """Refuse ``sync_batchnorm`` where there is something to synchronize.

    Raises:
        ValueError: There is.
    """
    synchronizes = trainer._accelerator_connector._layer_sync is not None  # private: nothing else
    if synchronizes and num_replicas > 1:
        raise ValueError(
            f"sync_batchnorm=True is not built over data_parallel_size={num_replicas} replicas, "
            f"which would wait for each other in every microbatch's forward; leave it out, and "
            f"each replica has its own statistics, or use a norm of one sample such as GroupNorm"
        )


def check_profiler(trainer: Trainer) -> None:
    """Refuse a profiler that would end the processes.

    Raises:
        ValueError: It would; the message says why, and what would do.
    """
    # It starts anew with each step, while messages that it has seen begin are under way.
    if isinstance(trainer.profiler, PyTorchProfiler) and trainer.world_size > 1:  # type: ignore[attr-defined] # set at run time
        raise ValueError(
            "PyTorchProfiler crashes in torch where messages between ranks are under way while it "
            'starts or ends a trace; use profiler="simple" or "advanced", or devices=1'
        )
