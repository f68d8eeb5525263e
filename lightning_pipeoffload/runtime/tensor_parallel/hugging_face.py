"""The plan by which a model of Hugging Face's shares its layers, as torch's styles."""

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
    """Return the plan that a Hugging Face model has itself, for ``parallelize_module``.

    ::

        def configure_model(self):
            self.model = LlamaForCausalLM(self.config)
            mesh = self.device_mesh["tensor_parallel"]
            parallelize_module(self.model, mesh, tensor_parallel_plan(self.model))

    Each rank has some of the heads of an attention, whose numbers ``tensor_parallel_size`` has to
    divide. A head whose weight is the embedding's stays whole.

    Args:
        model: A model of transformers.

    Raises:
        ValueError: The model has no plan, or one with parts that are not supported.
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
