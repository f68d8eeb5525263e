"""Writes the adapters of a peft model alone, in peft's own format."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_pipeoffload.runtime.stored_tensor import value_of


def is_peft_model(given: Any) -> bool:
    """Whether an object is a model that peft has given adapters."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(given, peft.PeftModel)


def save_adapters(module: LightningModule, folder: Path) -> None:
    """Write the adapters of a module's peft model once, in a hook; all ranks call it.

    Raises:
        ValueError: The module has no such model, or several.
    """
    found = [child for child in module.modules() if is_peft_model(child)]
    if len(found) != 1:
        raise ValueError(
            f"save_pretrained was given a {type(module).__name__} with {len(found)} models of "
            f"peft, and writes the adapters of one; of all weights save a checkpoint, and give "
            f"save_pretrained its path"
        )
    model: Any = found[0]
    strategy: Any = module.trainer.strategy
    entries = adapter_entries(model)
    # peft may ask the hub which entries it saves, so that ranks might disagree.
    names = strategy.broadcast([*entries])
    values = {name: _gather(strategy, entries[name]).cpu() for name in names}
    if strategy.is_global_zero:
        write_adapters(model, values, folder)
    strategy.barrier()


def _gather(strategy: Any, tensor: Tensor) -> Tensor:
    value: Tensor = tensor.detach()
    if isinstance(value, DTensor):
        value = value.full_tensor()
    elif hasattr(strategy, "gather"):
        value = strategy.gather(tensor)
    return value


def adapter_entries(model: Any) -> dict[str, Tensor]:
    """Return the entries of a peft model's state dict that peft saves."""
    from peft import get_peft_model_state_dict  # noqa: PLC0415 - of the user's own

    state = model.state_dict(keep_vars=True)
    saved = {
        id(value)
        for adapter in model.peft_config
        for value in get_peft_model_state_dict(model, state, adapter).values()
    }
    return {name: value for name, value in state.items() if id(value) in saved}


def write_adapters(model: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write adapters as ``PeftModel.save_pretrained`` does.

    Args:
        model: The peft model; its own values are not read.
        weights: The values of :func:`adapter_entries`, which may still be in a file.
        folder: The folder.
    """
    values = {name: value_of(tensor) for name, tensor in weights.items()}
    model.save_pretrained(folder, state_dict=values)
