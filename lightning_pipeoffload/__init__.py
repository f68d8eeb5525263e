"""Zero-bubble pipeline parallelism with planned activation offload for PyTorch Lightning.

Importing it registers the strategies: ``Trainer(strategy="pipeoffload")``, and one name for each
schedule, ``"pipeoffload_zb_h1"`` for instance.
"""

import sys

if sys.platform != "linux":
    raise ImportError(
        f"lightning_pipeoffload runs on Linux only, and this is {sys.platform}; use a Linux "
        f"machine or container, or WSL 2 on Windows"
    )

import lightning_pipeoffload.lightning_names  # noqa: F401, I001 - first: what it does to imports

from lightning_pipeoffload.callbacks import MemoryPicture
from lightning_pipeoffload.callbacks import PipelineMonitor
from lightning_pipeoffload.checkpoints import load_weights
from lightning_pipeoffload.checkpoints import save_pretrained
from lightning_pipeoffload.odc import OnDemandStrategy
from lightning_pipeoffload.processes import data_parallel_rank, data_parallel_size, reads_data
from lightning_pipeoffload.runtime.tensor_parallel import tensor_parallel_plan
from lightning_pipeoffload.runtime.weight_grad import chunked_loss
from lightning_pipeoffload.runtime.weight_grad import defer_weight_grad
from lightning_pipeoffload.strategy import PipeOffloadStrategy
from lightning_pipeoffload.strategy_names import register_strategies
from lightning_pipeoffload.texts.minibatch import Minibatch, MinibatchCollate, MinibatchSampler
from lightning_pipeoffload.texts.packed_rows import PackedRows, PackedRowsSampler

__version__ = "0.1.0"
__all__ = [
    "MemoryPicture",
    "Minibatch",
    "MinibatchCollate",
    "MinibatchSampler",
    "OnDemandStrategy",
    "PackedRows",
    "PackedRowsSampler",
    "PipeOffloadStrategy",
    "PipelineMonitor",
    "chunked_loss",
    "data_parallel_rank",
    "data_parallel_size",
    "defer_weight_grad",
    "load_weights",
    "reads_data",
    "save_pretrained",
    "tensor_parallel_plan",
]

register_strategies()
