"""A model's weights in files of any kind that is around, of which each is read when it is used."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_pipeoffload.checkpoints.folder import META_FILE
from lightning_pipeoffload.checkpoints.stored_file import is_archive, load_later
from lightning_pipeoffload.checkpoints.stored_folder import StoredFolder
from lightning_pipeoffload.runtime.stored_tensor import StoredTensor

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
_SUFFIX = ".safetensors"


def open_weights(path: str | Path) -> dict[str, Tensor]:
    """Return the weights in a file or a folder, by their keys there; their values are read later.

    Args:
        path: A Lightning checkpoint, as a file or a folder; a file of ``torch.save`` with a state
            dict; a file of safetensors, or a folder of them with or without an index.

    Raises:
        FileNotFoundError: There is nothing, or a shard is missing.
        ValueError: There is something else.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path} to load weights from")
    return _open_shards([path]) if path.suffix == _SUFFIX else _open_file(path)


def _open_folder(path: Path) -> dict[str, Tensor]:
    if (path / META_FILE).is_file():
        saved = StoredFolder(path, weights_only=True).load(("model", "state_dict"))
        return _only_tensors(next(iter(saved.values())))
    if (path / INDEX_FILE).is_file():
        shards = json.loads((path / INDEX_FILE).read_text())["weight_map"]
        found = _open_shards(path / name for name in sorted({*shards.values()}))
        return _check_index(found, shards)
    if (path / WEIGHTS_FILE).is_file():
        return _open_shards([path / WEIGHTS_FILE])
    raise ValueError(
        f"the folder {path} has no {META_FILE}, which a checkpoint has, and no {WEIGHTS_FILE} or "
        f"{INDEX_FILE}, which save_pretrained writes; name the folder that has one of them"
    )


def _check_index(found: dict[str, Tensor], shards: Mapping[str, str]) -> dict[str, Tensor]:
    absent = [key for key in shards if key not in found]
    if absent:
        raise ValueError(
            f"{INDEX_FILE} says that {absent[0]} is in {shards[absent[0]]}, which has no such key; "
            f"the files are of different models, get all of them anew"
        )
    return {key: found[key] for key in shards}


def _open_shards(paths: Iterable[Path]) -> dict[str, Tensor]:
    # Here, for safetensors comes with the extra "hf".
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    found: dict[str, Tensor] = {}
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(
                f"{path.name} is not in {path.parent}, whose index names it; get this file too"
            )
        try:
            file = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read: {error}; get it anew") from error
        for key in file.keys():  # noqa: SIM118 - it is no dict
            meta = _shape_of(file.get_slice(key))
            found[key] = StoredTensor(meta, partial(_read, path, key))
    return found


def _shape_of(part: Any) -> Tensor:
    # An empty part of it: only so are safetensors' names of dtypes translated by safetensors.
    shape = part.get_shape()
    dtype = (part[:0] if shape else part[...]).dtype
    return torch.empty(shape, dtype=dtype, device="meta")


def _read(path: Path, key: str) -> Tensor:
    from safetensors import safe_open  # noqa: PLC0415 - as above

    # Opened anew: what was read stays in memory for as long as the file is open.
    with safe_open(path, framework="pt") as file:
        value: Tensor = file.get_tensor(key).clone()
    return value


def _open_file(path: Path) -> dict[str, Tensor]:
    if not is_archive(path):
        raise ValueError(
            f"{path} is no file of torch.save (the format since torch 1.6) and no {_SUFFIX}; "
            f"save it anew with torch.save(state_dict, path)"
        )
    saved = load_later(path, weights_only=True, is_later=lambda place: True)
    state = saved.get("state_dict", saved) if isinstance(saved, Mapping) else None
    found = _only_tensors(state) if isinstance(state, Mapping) else {}
    if not found:
        raise ValueError(f"{path} has neither a 'state_dict' nor tensors by their names")
    return found


def _only_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}
