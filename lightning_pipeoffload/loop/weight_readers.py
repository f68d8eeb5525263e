"""Refuses averages of weights, and warns of histograms, before their hooks fail.

A rank has the weights of its own stages only. Found is what the code of a hook names; a hook that
reads a remote weight in another form is refused when it does so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_pipeoffload.lightning_names import PACKAGES
from lightning_pipeoffload.runtime.cut import is_tracked_copy

log = logging.getLogger(__name__)

_HOOKS = (
    *("on_before_zero_grad", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end"),
    "on_validation_end",
)
_WEIGHTS = {"parameters", "named_parameters", "state_dict"}
_HISTOGRAMS = {"add_histogram", "Histogram"}
_OURS = tuple(f"{name}." for name in (*PACKAGES, "lightning_pipeoffload"))


def check_hooks_reading_weights(trainer: Trainer) -> None:
    """Look at the hooks between training steps of the module and its callbacks.

    Raises:
        ValueError: One averages weights into clones, or into a copy made before the fit.
    """
    module = trainer.lightning_module
    for owner in (module, *trainer.callbacks):  # type: ignore[attr-defined] # set at run time
        for hook in _HOOKS:
            names = _names_in(owner, hook)
            where = f"{type(owner).__name__}.{hook}"
            for attribute in _find_averaged_weights(owner, names, module):
                raise ValueError(
                    f"{where} averages all weights into {attribute}, and a rank has those of its "
                    f"stages only; use Lightning's callback EMAWeightAveraging(), or start from "
                    f"copy.deepcopy(pl_module) in on_fit_start, of which each rank averages a part"
                )
            if names & _HISTOGRAMS and names & _WEIGHTS and trainer.is_global_zero:
                log.warning(
                    "%s draws histograms of weights, and a rank has those of its stages only: "
                    "draw trainer.strategy.gather(parameter), which all ranks call",
                    where,
                )


def _names_in(owner: LightningModule | Callback, hook: str) -> set[str]:
    """Return the names in the code of a user's hook; none if it gathers what it reads."""
    function = getattr(type(owner), hook, None)  # a callback may be a mock
    if function is None or function.__module__.startswith(_OURS):
        return set()
    names = _names_of(function)
    for name in tuple(names):  # methods of the same object that it calls
        helper = getattr(type(owner), name, None)
        if getattr(helper, "__module__", "lightning.").startswith(_OURS):
            continue
        names |= _names_of(helper)
    return set() if "gather" in names else names


def _names_of(function: Any) -> set[str]:
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    return set() if code is None else set(_names_in_code(code))


def _names_in_code(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # a comprehension or a function
            yield from _names_in_code(constant)


def _find_averaged_weights(owner: Any, names: set[str], module: nn.Module) -> Iterator[str]:
    shapes = [[p.shape for p in module.parameters() if p.requires_grad or not trained]
              for trained in (False, True)]  # fmt: skip
    attributes = {**vars(owner), **vars(owner).get("_modules", {})}
    for name in sorted(names & attributes.keys()):
        values = _values_in(attributes[name])
        copies = [value for value in values if isinstance(value, AveragedModel)]
        if "update_parameters" in names and any(not is_tracked_copy(c.module) for c in copies):
            yield name
        is_of_tensors = bool(values) and all(isinstance(value, Tensor) for value in values)
        if names & _WEIGHTS and is_of_tensors and [v.shape for v in values] in shapes:
            yield name


def _values_in(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return list(value) if is_list else [value]
