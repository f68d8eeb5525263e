"""Writes a checkpoint's weights, or adapters of peft, for Hugging Face's libraries to read."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_pipeoffload.checkpoints.file import replace_atomically
from lightning_pipeoffload.checkpoints.hugging_face import convert_to_hub
from lightning_pipeoffload.checkpoints.load_weights import (
    INDEX_FILE,
    WEIGHTS_FILE,
    open_weights,
)
from lightning_pipeoffload.planning.limits import parse_bytes
from lightning_pipeoffload.runtime import value_of


def save_pretrained(
    source: str | Path | LightningModule,
    folder: str | Path,
    config: Any | None = None,
    *,
    prefix: str | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write the weights of a checkpoint as ``PreTrainedModel.save_pretrained`` does, or adapters.

    Weights are read and written one shard at a time. Other files in the folder, such as those of a
    tokenizer, stay. Adapters are written alone, as ``PeftModel.save_pretrained`` does.

    Args:
        source: A Lightning checkpoint, as a file or a folder. Or the LightningModule, in a hook and
            on all ranks, to write the adapters of its peft model.
        folder: The folder to write, for ``from_pretrained``.
        config: The model's configuration, which names its class (``config.architectures``, else the
            class that ``AutoModelForCausalLM`` takes). None: the keys are written unchanged. Or a
            peft model, possibly on the meta device, to write the checkpoint's adapters.
        prefix: The prefix of the model's keys in the checkpoint, such as "model." if the
            LightningModule has the model as ``self.model``. None: found.
        max_shard_size: The most bytes of a file, as a number or as in "5GB".

    Raises:
        TypeError: The source is neither, but the model itself for instance.
        ValueError: The checkpoint lacks the model's weights, or the module has no peft model.
    """
    folder = Path(folder)
    if isinstance(source, LightningModule):
        return save_adapters(source, folder)
    if not isinstance(source, str | PathLike):
        raise TypeError(
            f"save_pretrained got a {type(source).__name__}; give it the path of a checkpoint and "
            f"the model's config, or the LightningModule to write its adapters"
        )
    weights = open_weights(source)
    folder.mkdir(parents=True, exist_ok=True)
    if is_peft_model(config):
        entries = adapter_entries(config)
        return write_adapters(
            config, _select_model_weights(config, entries, weights, prefix, source), folder
        )
    if config is None:
        weights = {k.removeprefix(prefix or ""): v for k, v in weights.items()}
    else:
        model = _make_meta_model(config)
        weights = _select_model_weights(model, model.state_dict(), weights, prefix, source)
        dtype = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
        weights = convert_to_hub(model, weights)
        _write_configs(model, dtype, folder)
    return _write_shards(weights, folder, parse_bytes(max_shard_size, "max_shard_size"))


def _make_meta_model(config: Any) -> Any:
    """Return the model of a configuration, on the meta device."""
    import transformers  # noqa: PLC0415 - comes with the extra "hf"

    with torch.device("meta"):
        if config.architectures:
            model = getattr(transformers, config.architectures[0])(deepcopy(config))
        else:
            model = transformers.AutoModelForCausalLM.from_config(deepcopy(config))
    model.tie_weights()
    return model


def _select_model_weights(
    model: Any,
    expected: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    prefix: str | None,
    path: str | Path,
) -> dict[str, Tensor]:
    if prefix is None:
        prefix = _find_prefix(expected, weights)
    lost = [name for name in expected if prefix + name not in weights]
    shapes = [
        n for n in expected if n not in lost and expected[n].shape != weights[prefix + n].shape
    ]
    if lost or shapes:
        name = prefix + (lost or shapes)[0]
        what = "lacks" if lost else "has in another shape"
        advice = "give the config and the prefix of the model that was trained"
        if any(".base_layer." in key for key in weights) and not is_peft_model(model):
            advice = (
                "it has adapters of peft: give the peft model in place of the config to write "
                "these alone, which PeftModel.from_pretrained reads and merge_and_unload() merges"
            )
        raise ValueError(f"{path} {what} {name} of {type(model).__name__}; {advice}")
    return {name: weights[prefix + name] for name in expected}


def _find_prefix(expected: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> str:
    """Return the prefix of a model's keys in a checkpoint."""
    last = max(expected, key=len)
    prefixes = [key.removesuffix(last) for key in weights if key.endswith(last)]
    fits = [each for each in prefixes if all(each + name in weights for name in expected)]
    return min(fits, key=len, default=min(prefixes, key=len, default=""))


def _write_configs(model: Any, dtype: torch.dtype, folder: Path) -> None:
    model.config.architectures = [type(model).__name__]
    model.config.dtype = str(dtype).removeprefix("torch.")
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _write_shards(weights: Mapping[str, Tensor], folder: Path, max_bytes: int) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415 - comes with the extra "hf"

    shards = list(_split_into_shards(weights, max_bytes))
    names = [_shard_name(number, len(shards)) for number in range(1, len(shards) + 1)]
    for name, keys in zip(names, shards, strict=True):
        with replace_atomically(folder / name) as part:
            values = {key: value_of(weights[key]).contiguous() for key in keys}
            save_file(values, part, metadata={"format": "pt"})
            del values
    stale = {*folder.glob("model-*-of-*.safetensors"), folder / WEIGHTS_FILE, folder / INDEX_FILE}
    for path in stale - {folder / name for name in names}:
        path.unlink(missing_ok=True)
    if len(shards) > 1:
        shard_of = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
        size = sum(tensor.nbytes for tensor in weights.values())
        index = {"metadata": {"total_size": size}, "weight_map": shard_of}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _shard_name(number: int, count: int) -> str:
    return WEIGHTS_FILE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"


def _split_into_shards(weights: Mapping[str, Tensor], max_bytes: int) -> Iterator[list[str]]:
    """Yield the keys of each shard, in their order."""
    shard: list[str] = []
    size = 0
    for key, tensor in weights.items():
        if shard and size + tensor.nbytes > max_bytes:
            yield shard
            shard, size = [], 0
        shard.append(key)
        size += tensor.nbytes
    yield shard


def is_peft_model(model: Any) -> bool:
    """Return whether an object is a model with adapters of peft."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def save_adapters(module: LightningModule, folder: Path) -> None:
    """Write the adapters of a module's peft model once, in a hook; all ranks call it.

    Raises:
        ValueError: The module has no such model, or several.
    """
    models = [child for child in module.modules() if is_peft_model(child)]
    if len(models) != 1:
        raise ValueError(
            f"save_pretrained got a {type(module).__name__} with {len(models)} models of peft, but "
            f"writes the adapters of one; to write all weights, save a checkpoint and pass its path"
        )
    model: Any = models[0]
    strategy: Any = module.trainer.strategy
    entries = adapter_entries(model)
    # peft may query the hub for the entries to save, and ranks might get different answers.
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
