"""Translates the tensor-parallel plan of a Hugging Face model to torch's parallel styles."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)
from typing_extensions import override

_HEADS = "num_attention_heads", "num_key_value_heads"
_OF_HEADS = re.compile(r"attn|attention")  # in the path of a layer that is divided by heads


# Private: parallelize_module calls a style's _apply, which knows how many tensor ranks there are.


class _IfEven(ParallelStyle):
    """Divides a layer if the first dimension of its weight divides evenly; else leaves it whole."""

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight: Any = module.weight
        if int(weight.shape[0]) % device_mesh.size():
            return module
        return super()._apply(module, device_mesh)  # type: ignore[safe-super] # that of a style


class _EvenColwise(_IfEven, ColwiseParallel):
    """Of a layer's outputs."""


class _EvenRowwise(_IfEven, RowwiseParallel):
    """Of an embedding's rows."""


class _ByHeads(ColwiseParallel):
    """Divides a projection by heads; refuses numbers of heads that do not divide evenly."""

    def __init__(self, heads: dict[str, int]) -> None:
        super().__init__()
        self._heads = heads

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, count in self._heads.items():
            if count % device_mesh.size():
                raise ValueError(
                    f"tensor_parallel_size={device_mesh.size()} does not divide the {count} heads "
                    f"of config.{name}, of which each rank has as many; choose a size that does, "
                    f"or write a plan with torch's styles that leaves their projections whole"
                )
        return super()._apply(module, device_mesh)


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": partial(_EvenColwise, output_layouts=Replicate()),
    "colwise_gather_output": partial(_EvenColwise, output_layouts=Replicate()),
    "embedding_rowwise": partial(_EvenRowwise, input_layouts=Replicate()),
    # Norms of the heads that a rank has; the gradients of their weights are summed.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(use_local_output=True),
}


def tensor_parallel_plan(model: Any) -> dict[str, ParallelStyle]:
    """Return a Hugging Face model's own tensor-parallel plan, for torch's ``parallelize_module``.

    ::

        def configure_model(self):
            self.model = LlamaForCausalLM(self.config)
            mesh = self.device_mesh["tensor_parallel"]
            parallelize_module(self.model, mesh, tensor_parallel_plan(self.model))

    Each tensor rank has some of the attention heads; ``tensor_parallel_size`` has to divide their
    number, and that of the key heads, else ``parallelize_module`` raises ``ValueError``. The plan
    leaves out an output projection that is tied to the embedding, and leaves whole a vocabulary
    that ``tensor_parallel_size`` does not divide.

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
    counts = {each: getattr(config, each, None) for each in _HEADS}
    heads = {each: count for each, count in counts.items() if count}
    return {
        path: _ByHeads(heads) if kind == "colwise" and _OF_HEADS.search(path) else _STYLES[kind]()
        for path, kind in kinds.items()
    }
