"""Loads weights from files into a module; each rank reads only the weights that it owns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeoffload.checkpoints.file import is_torch_zip, load_lazily, to_stored_tensor
from lightning_pipeoffload.checkpoints.folder import META_FILE, StoredFolder
from lightning_pipeoffload.checkpoints.hugging_face import convert_from_hub, is_hugging_face
from lightning_pipeoffload.checkpoints.load_4bit import (
    Entries,
    describe_shape_mismatch,
    load_4bit,
    pop_quant_states,
)
from lightning_pipeoffload.runtime import value_of
from lightning_pipeoffload.runtime.making import HeapTrimmer
from lightning_pipeoffload.runtime.shapes import (
    RemoteTensor,
    ShapeOnly,
    is_4bit,
    local_part,
    sharding_of,
)
from lightning_pipeoffload.runtime.users_code import Slot, find_slots

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
_SUFFIX = ".safetensors"
KeyMapping = Mapping[str, str] | Callable[[str], str | None]


def load_weights(
    module: nn.Module,
    path: str | Path,
    *,
    prefix: str = "",
    key_mapping: KeyMapping | None = None,
    strict: bool = True,
) -> None:
    """Load weights from files into a module, or into a submodule.

    Call it in ``configure_model`` after the layers are made, or anywhere else before training. A
    rank reads the tensors that it owns, one at a time, and casts them to the module's dtypes. A
    tensor on the meta device gets memory on the default device. The weight of a 4-bit layer of
    bitsandbytes is quantized when it is read, or loaded packed.

    Args:
        module: The module that the weights belong to, such as ``self.model`` for the weights of the
            Hugging Face model in a LightningModule.
        path: A Lightning checkpoint, as a file or a folder (FSDPStrategy's too); a file with a
            state dict; a file of safetensors, or a folder of them as ``save_pretrained`` writes it.
        prefix: A prefix of the files' keys that the module's names do not have, such as "model."
            for the entries of a checkpoint that belong to ``self.model``. Other keys are ignored.
        key_mapping: Regular expressions and their replacements, or a function that returns the name
            of a key, or None to ignore it.
        strict: Whether to refuse weights that are missing in the files or in the module.

    Raises:
        FileNotFoundError: There is no such file or folder, or a shard is missing.
        ValueError: The weights are not this module's.
    """
    weights = _rename(open_weights(path), prefix, key_mapping)
    if is_hugging_face(module):
        weights = convert_from_hub(module, weights)
    tensors = {
        name: tensor
        for name, tensor in module.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
    }
    pop_quant_states(tensors)
    entries = pop_quant_states(weights)
    fit = _WeightChecks(module, tensors, weights, entries, str(path))
    fit.refuse_other_model()
    fit.refuse_packed()
    fit.refuse_shapes()
    if strict:
        fit.refuse_missing()
        fit.refuse_unexpected()
    fit.refuse_differing_ties()
    device, freed = torch.get_default_device(), HeapTrimmer()
    slots: dict[int, list[Slot]] = {}
    for slot in find_slots(module):
        slots.setdefault(id(slot.tensor), []).append(slot)
    with torch.no_grad():
        for tensor, name in {id(tensors[name]): name for name in fit.names}.items():
            if is_4bit(tensors[name]):
                load_4bit(slots[tensor], weights[name], entries.get(name, {}), device)
                freed.trim_heap()  # bitsandbytes takes some times a weight to quantize it on a CPU
            else:
                filled = _materialize(slots.get(tensor, []), tensors[name], device)
                if not filled.is_meta:
                    _copy(filled, weights[name])


def _materialize(slots: Sequence[Slot], tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor; replace one on the meta device with one that has memory."""
    if not tensor.is_meta or device.type == "meta":
        return tensor
    if isinstance(tensor, RemoteTensor):
        filled: Tensor = tensor.on_device(device)
    else:
        filled = torch.empty_like(tensor, device=device)
        filled = (
            nn.Parameter(filled, tensor.requires_grad)
            if isinstance(tensor, nn.Parameter)
            else filled
        )
    for slot in slots:
        slot.put(filled)
    return filled


def _copy(filled: Tensor, weight: Tensor) -> None:
    """Copy a weight; of a layer that tensor ranks share, this rank's part."""
    sharding = sharding_of(filled)
    if sharding is None:
        filled.copy_(weight)  # reads nothing for a shape
        return
    part = local_part(filled)
    if isinstance(part, ShapeOnly):
        part.zero_()  # a write, for observers
    else:
        part.copy_(sharding.local_shard_of(value_of(weight)))


def _rename(
    weights: Mapping[str, Tensor], prefix: str, mapping: KeyMapping | None
) -> dict[str, Tensor]:
    renamed = {}
    for key, tensor in weights.items():
        name = _new_name(key.removeprefix(prefix), mapping) if key.startswith(prefix) else None
        if name is not None:
            renamed[name] = tensor
    return renamed


def _new_name(key: str, mapping: KeyMapping | None) -> str | None:
    if mapping is None or callable(mapping):
        return key if mapping is None else mapping(key)
    for pattern, replacement in mapping.items():
        key = re.sub(pattern, replacement, key)
    return key


class _WeightChecks:
    """Assigns weights to a module, and refuses those that do not fit.

    Args:
        module: The module.
        tensors: Its tensors by name.
        weights: The weights, by the module's names.
        entries: The quantization states of packed weights.
        path: The path of the weights.
    """

    def __init__(
        self,
        module: nn.Module,
        tensors: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        entries: Mapping[str, Entries],
        path: str,
    ) -> None:
        self._module = module
        self._kind = type(module).__name__
        self._tensors = tensors
        self._weights = weights
        self._entries = entries
        self._path = path
        self.names = [name for name in tensors if name in weights]

    def refuse_other_model(self) -> None:
        if not self.names:
            in_file, in_module = (
                next(iter(self._weights), "nothing"),
                next(iter(self._tensors), "nothing"),
            )
            raise ValueError(
                f"no key of {self._path}, such as {in_file}, is a name in {self._kind}, such as "
                f"{in_module}; give load_weights the submodule of the weights, prefix=... or "
                f"key_mapping=..."
            )

    def refuse_packed(self) -> None:
        """Refuse packed 4-bit weights for layers that are not of bitsandbytes."""
        for name in self._entries:
            if name in self._tensors and not is_4bit(self._tensors[name]):
                raise ValueError(
                    f"{name} is a packed 4-bit weight of bitsandbytes in {self._path}, but not in "
                    f"{self._kind}; replace its layer with a Linear4bit first "
                    f"(transformers.integrations.replace_with_bnb_linear)"
                )

    def refuse_shapes(self) -> None:
        slots = {slot.name: slot for slot in find_slots(self._module)}
        for name in self.names:
            if is_4bit(self._tensors[name]):
                entries = self._entries.get(name, {})
                misfit = describe_shape_mismatch(slots[name], self._weights[name], entries)
                if misfit:
                    raise ValueError(f"the 4-bit weight {name} is {misfit}: {self._path}")
                continue
            sharding = sharding_of(self._tensors[name])
            whole = self._tensors[name] if sharding is None else sharding
            in_file, in_module = tuple(self._weights[name].shape), tuple(whole.shape)
            if in_file != in_module:
                raise ValueError(
                    f"{name} has shape {in_file} in {self._path} and shape {in_module} in "
                    f"{self._kind}; make the module with the sizes of the weights"
                )

    def refuse_missing(self) -> None:
        """Refuse files with missing weights; one name of a tied weight is enough."""
        in_file = {id(self._tensors[name]) for name in self.names}
        missing = [name for name, tensor in self._tensors.items() if id(tensor) not in in_file]
        missing = _not_matching(
            missing, getattr(self._module, "_keys_to_ignore_on_load_missing", None)
        )
        if missing:
            raise ValueError(
                f"{self._path} lacks {_list_names(missing)} of {self._kind}; strict=False leaves "
                f"their values unchanged"
            )

    def refuse_unexpected(self) -> None:
        left = [name for name in self._weights if name not in self._tensors]
        left = _not_matching(
            left, getattr(self._module, "_keys_to_ignore_on_load_unexpected", None)
        )
        if left:
            raise ValueError(
                f"{self._path} has {_list_names(left)}, which {self._kind} does not have; "
                f"strict=False ignores them"
            )

    def refuse_differing_ties(self) -> None:
        """Refuse different values for one tied tensor."""
        first: dict[int, str] = {}
        for name in self.names:
            other = first.setdefault(id(self._tensors[name]), name)
            if other != name and not self._are_equal(name, other):
                raise ValueError(
                    f"{other} and {name} are one tied tensor in {self._kind}, but differ in "
                    f"{self._path}; make the module without tied weights"
                )

    def _are_equal(self, name: str, other: str) -> bool:
        return torch.equal(value_of(self._weights[name]), value_of(self._weights[other]))


def _not_matching(names: Iterable[str], patterns: Iterable[str] | None) -> list[str]:
    ignored = list(patterns or ())
    return [name for name in names if not any(re.search(each, name) for each in ignored)]


def _list_names(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def open_weights(path: str | Path) -> dict[str, Tensor]:
    """Return the weights in a file or a folder by their keys; each is read when it is used.

    Args:
        path: As in :func:`load_weights`.

    Raises:
        FileNotFoundError: There is no such file or folder, or a shard is missing.
        ValueError: The file or folder has another format.
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
        tensors = _open_shards(path / name for name in sorted({*shards.values()}))
        return _check_index(tensors, shards)
    if (path / WEIGHTS_FILE).is_file():
        return _open_shards([path / WEIGHTS_FILE])
    raise ValueError(
        f"the folder {path} has no {META_FILE}, which a checkpoint has, and no {WEIGHTS_FILE} or "
        f"{INDEX_FILE}, which save_pretrained writes; name the folder that has one of them"
    )


def _check_index(tensors: dict[str, Tensor], shards: Mapping[str, str]) -> dict[str, Tensor]:
    absent = [key for key in shards if key not in tensors]
    if absent:
        raise ValueError(
            f"{INDEX_FILE} lists {absent[0]} in {shards[absent[0]]}, which has no such key; the "
            f"files belong to different models: download all of them again"
        )
    return {key: tensors[key] for key in shards}


def _open_shards(paths: Iterable[Path]) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - of the extra "hf"

    tensors: dict[str, Tensor] = {}
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(
                f"{path.name} is listed in the index, but missing in {path.parent}; download it too"
            )
        try:
            file = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read: {error}; download it again") from error
        for key in file.keys():  # noqa: SIM118 - it is no dict
            tensors[key] = to_stored_tensor(file.get_tensor(key))
    return tensors


def _open_file(path: Path) -> dict[str, Tensor]:
    if not is_torch_zip(path):
        raise ValueError(
            f"{path} is no file of torch.save (the format since torch 1.6) and no {_SUFFIX}; "
            f"save it again with torch.save(state_dict, path)"
        )
    saved = load_lazily(path, weights_only=True, is_later=re.compile(""))
    state = saved.get("state_dict", saved) if isinstance(saved, Mapping) else None
    tensors = _only_tensors(state) if isinstance(state, Mapping) else {}
    if not tensors:
        raise ValueError(
            f"{path} has no 'state_dict', and no tensors by name; give a file with either"
        )
    return tensors


def _only_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}
