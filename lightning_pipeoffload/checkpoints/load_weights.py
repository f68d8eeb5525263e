"""Weights of files into a module, of which a rank reads what it has."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_pipeoffload.checkpoints.hugging_face import is_hugging_face, to_module
from lightning_pipeoffload.checkpoints.stored_weights import open_weights
from lightning_pipeoffload.runtime.stored_tensor import value_of

KeyMapping = Mapping[str, str] | Callable[[str], str | None]


def load_weights(
    module: nn.Module,
    path: str | Path,
    *,
    prefix: str = "",
    key_mapping: KeyMapping | None = None,
    strict: bool = True,
) -> None:
    """Load weights from files into a module, or into a part of one.

    Call it in ``configure_model`` after the layers are made, or anywhere else before training. Of
    what the module has as a shape only, nothing is read; values are cast to the module's dtypes.

    Args:
        module: The module whose weights they are; ``self.model``, say, for those of the Hugging
            Face model that a LightningModule has.
        path: A Lightning checkpoint, as a file or a folder (FSDPStrategy's too); a file with a
            state dict; a file of safetensors, or a folder of them as ``save_pretrained`` writes it.
        prefix: What all keys that are meant begin with in the files, and not in the module:
            "model.", say, for the part of a checkpoint that belongs to ``self.model``.
        key_mapping: Regular expressions and what to put in their place, or a function of a key;
            where it returns None the entry is left out.
        strict: Whether to refuse weights that the files lack, and such as the module lacks.

    Raises:
        FileNotFoundError: There is nothing, or a shard is missing.
        ValueError: The weights are not this module's.
    """
    weights = _rename(open_weights(path), prefix, key_mapping)
    if is_hugging_face(module):
        weights = to_module(module, weights)
    own = {
        name: tensor
        for name, tensor in module.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
    }
    fit = _Fit(module, own, weights, str(path))
    fit.refuse_other_model()
    fit.refuse_shapes()
    if strict:
        fit.refuse_missing()
        fit.refuse_unexpected()
    fit.refuse_apart()
    with torch.no_grad():
        for name in fit.names:
            if own[name].device.type != "meta":
                own[name].copy_(weights[name])  # nothing is read for what is a shape


def _rename(
    weights: Mapping[str, Tensor], prefix: str, mapping: KeyMapping | None
) -> dict[str, Tensor]:
    found = {}
    for key, tensor in weights.items():
        name = _new_name(key.removeprefix(prefix), mapping) if key.startswith(prefix) else None
        if name is not None:
            found[name] = tensor
    return found


def _new_name(key: str, mapping: KeyMapping | None) -> str | None:
    if mapping is None or callable(mapping):
        return key if mapping is None else mapping(key)
    for pattern, replacement in mapping.items():
        key = re.sub(pattern, replacement, key)
    return key


class _Fit:
    """What of some weights is a module's.

    Args:
        module: The module.
        own: Its tensors by name.
        weights: The weights, by the names that they would have in it.
        path: Where the weights are.
    """

    def __init__(
        self,
        module: nn.Module,
        own: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        path: str,
    ) -> None:
        self._module = module
        self._kind = type(module).__name__
        self._own = own
        self._weights = weights
        self._path = path
        self.names = [name for name in own if name in weights]

    def refuse_other_model(self) -> None:
        if not self.names:
            there, here = next(iter(self._weights), "nothing"), next(iter(self._own), "nothing")
            raise ValueError(
                f"no key of {self._path} is one of {self._kind}'s: {there} there, {here} here; "
                f"give load_weights the part of the module that the weights belong to, prefix=... "
                f"or key_mapping=..."
            )

    def refuse_shapes(self) -> None:
        for name in self.names:
            there, here = tuple(self._weights[name].shape), tuple(self._own[name].shape)
            if there != here:
                raise ValueError(
                    f"{name} is of shape {there} in {self._path} and of shape {here} in "
                    f"{self._kind}; make the module with the sizes that the weights have"
                )

    def refuse_missing(self) -> None:
        """Refuse what the files lack; of tied weights one name is enough."""
        there = {id(self._own[name]) for name in self.names}
        missing = [name for name, tensor in self._own.items() if id(tensor) not in there]
        missing = _without(missing, getattr(self._module, "_keys_to_ignore_on_load_missing", None))
        if missing:
            raise ValueError(
                f"{self._path} lacks {_some(missing)} of {self._kind}; with strict=False they stay "
                f"as they were made"
            )

    def refuse_unexpected(self) -> None:
        left = [name for name in self._weights if name not in self._own]
        left = _without(left, getattr(self._module, "_keys_to_ignore_on_load_unexpected", None))
        if left:
            raise ValueError(
                f"{self._path} has {_some(left)}, which {self._kind} has not; with strict=False "
                f"they are left out"
            )

    def refuse_apart(self) -> None:
        """Refuse two values for a weight that is one."""
        first: dict[int, str] = {}
        for name in self.names:
            other = first.setdefault(id(self._own[name]), name)
            if other != name and not self._are_equal(name, other):
                raise ValueError(
                    f"{other} and {name} are one tensor in {self._kind} and differ in "
                    f"{self._path}; make the module without tied weights"
                )

    def _are_equal(self, name: str, other: str) -> bool:
        return torch.equal(value_of(self._weights[name]), value_of(self._weights[other]))


def _without(names: Iterable[str], patterns: Iterable[str] | None) -> list[str]:
    ignored = list(patterns or ())
    return [name for name in names if not any(re.search(each, name) for each in ignored)]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
