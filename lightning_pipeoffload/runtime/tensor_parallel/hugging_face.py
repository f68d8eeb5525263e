"""Translates the tensor-parallel plan of a Hugging Face model to torch's parallel styles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}


def tensor_parallel_plan(model: Any) -> dict[str, ParallelStyle]:
    """Return a Hugging Face model's own tensor-parallel plan, for torch's ``parallelize_module``.

    ::

        def configure_model(self):
            self.model = LlamaForCausalLM(self.config)
            mesh = self.device_mesh["tensor_parallel"]
            parallelize_module(self.model, mesh, tensor_parallel_plan(self.model))

    Each tensor rank has some of the attention heads; ``tensor_parallel_size`` has to divide their
    number. The plan leaves out an output projection that is tied to the embedding.

    Args:
        model: A model of the library transformers.

    Raises:
        ValueError: The model has no plan, or its plan uses a style that is not supported.
    """
    name, config = type(model).__name__, getattr(model, "config", None)
    of_base = getattr(config, "base_model_tp_plan", None)
    if not of_base:
        raise ValueError(
            f"{name} has no plan of its own (config.base_model_tp_plan); write one with torch's "
            f"ColwiseParallel and RowwiseParallel"
        )
    base = model.base_model_prefix
    prefix = f"{base}." if hasattr(model, base) else ""
    kinds = {f"{prefix}{path}": kind for path, kind in of_base.items()}
    if not getattr(config, "tie_word_embeddings", False):
        kinds |= type(model)._tp_plan or {}  # private: nothing public has the head's
    for path, kind in kinds.items():
        if kind not in _STYLES:
            raise ValueError(
                f"{name} shares {path} as {kind!r}, which is not supported; write a plan with "
                f"torch's styles, or leave tensor_parallel_size out"
            )
    return {path: _STYLES[kind]() for path, kind in kinds.items()}
