"""Converts weights between the layouts of a Hugging Face model and of the hub.

Transformers renames, merges and splits weights when it loads and saves. This module applies the
same rules to weights that are still in a file: first to their shapes, to find the inputs of each
result, and to values when a result is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime import StoredTensor, value_of

_Weights = dict[str, Tensor]
_CachedCall = Callable[[Callable[[], _Weights]], _Weights]


def is_hugging_face(module: nn.Module) -> bool:
    """Return whether a module is a model of transformers."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def convert_from_hub(model: Any, weights: Mapping[str, Tensor]) -> _Weights:
    """Return weights of the hub under the names of a model of transformers.

    Args:
        model: The model; its own values are not read.
        weights: The weights by their names in the files.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415
    from transformers.core_model_loading import (  # noqa: PLC0415
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    state_dict = model.state_dict()
    converted: _Weights = {}
    pieces: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(weights, key=dot_natural_key):
        prefix = model.base_model_prefix
        name, pattern = rename_source_key(key, renamings, converters, prefix, state_dict)
        if name not in state_dict and key in state_dict:
            name, pattern = key, None
        if pattern is None or name not in state_dict:
            converted[name] = weights[key]
        else:
            pieces.setdefault(name, []).append((key, pattern))
    cached = _make_last_result_cache()
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    for name, parts in pieces.items():
        converted |= _convert_lazily(
            partial(_convert, model, by_pattern[parts[0][1]], name, parts),
            {key: weights[key] for key, _ in parts},
            cached,
        )
    return converted


def _convert(
    model: Any, rule: Any, name: str, parts: Sequence[tuple[str, str]], values: _Weights
) -> _Weights:
    rule = deepcopy(rule)
    for key, pattern in parts:
        rule.add_tensor(name, key, pattern, values[key])
    converted = rule.convert(name, model=model, config=model.config)
    return {key: value[0] if isinstance(value, list) else value for key, value in converted.items()}


def convert_to_hub(model: Any, weights: Mapping[str, Tensor]) -> _Weights:
    """Return a model's weights under the names of the hub, tied ones once.

    Args:
        model: A model of transformers; its own values are not read.
        weights: The weights by their names in the model.
    """
    from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415

    names = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    kept = {tensor: name for name, tensor in reversed(names.items())}
    # For tied weights, the name of the source, to which transformers ties the others.
    kept |= {names[name]: name for name in _tied_to(model) if name in names}
    once = {name: weights[name] for name in names if kept[names[name]] == name}
    revert = partial(revert_weight_conversion, model)
    cached = _make_last_result_cache()
    together = _convert_lazily(revert, once, cached)
    converted: _Weights = {}
    for group in _find_groups(revert, once, _sizes(together)):
        converted |= _convert_lazily(revert, {name: once[name] for name in group}, cached)
    return converted if _sizes(converted) == _sizes(together) else together


def _find_groups(
    convert: Callable[[_Weights], _Weights],
    weights: _Weights,
    expected: Mapping[str, torch.Size],
) -> Iterator[list[str]]:
    """Yield the smallest groups of weights that must be converted together, by submodule."""
    left = {name: (_empty_on_meta(tensor), name.split(".")) for name, tensor in weights.items()}
    for depth in range(max(len(parts) for _, parts in left.values()), -1, -1):
        groups: dict[tuple[str, ...], list[str]] = {}
        for name, (_, parts) in left.items():
            groups.setdefault((*parts[:depth],), []).append(name)
        for names in groups.values():
            sizes = _sizes(convert({name: left[name][0] for name in names}))
            if sizes.items() <= expected.items():
                yield names
                for name in names:
                    del left[name]


def _tied_to(model: nn.Module) -> list[str]:
    return list((getattr(model, "all_tied_weights_keys", None) or {}).values())


def _sizes(weights: _Weights) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in weights.items()}


def _make_last_result_cache() -> _CachedCall:
    """Return a function that calls another one, and caches the last result.

    Results of one conversion are used one after the other.
    """

    @lru_cache(maxsize=1)
    def call(make: Callable[[], _Weights]) -> _Weights:
        return make()

    return call


def _convert_lazily(
    convert: Callable[[_Weights], _Weights], weights: _Weights, cached: _CachedCall
) -> _Weights:
    """Return the results of a conversion, which runs when one of them is used."""
    shapes = convert({key: _empty_on_meta(tensor) for key, tensor in weights.items()})

    def make() -> _Weights:
        return convert({key: value_of(tensor) for key, tensor in weights.items()})

    def value(key: str) -> Tensor:
        return cached(make)[key]

    return {key: StoredTensor(shape, partial(value, key)) for key, shape in shapes.items()}


def _empty_on_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
