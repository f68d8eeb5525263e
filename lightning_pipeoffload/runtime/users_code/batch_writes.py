"""Copies of a microbatch, for steps that change it: ``batch["x"].div_(255)``, ``batch.pop("n")``.

Each stage of a rank runs the beginning of the step on the same microbatch, and would change it once
more; and microbatches are views of one batch, so that a write into one looks like a write into what
autograd has saved of others. So where a probe has seen a change, each stage has a copy. What the
rank's last one has written into tensors the batch has then, for hooks.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime.leaves import leaves_of
from lightning_pipeoffload.runtime.users_code.libraries import is_opaque
from lightning_pipeoffload.runtime.users_code.look import Look, is_same_look, version_of
from lightning_pipeoffload.runtime.users_code.step_call import StepCall, UsersStep


def copy_part(value: Any, known: dict[int, Any] | None = None) -> Any:
    """Copy the tensors and containers of a microbatch; what is there twice stays one object.

    Args:
        value: The microbatch, or a part of it.
        known: Copies by the identity of what was copied.
    """
    known = {} if known is None else known
    if id(value) not in known:
        known[id(value)] = _copy(value, partial(copy_part, known=known))
    return known[id(value)]


def look_at(value: Any) -> Look:
    """Look at all that a microbatch consists of."""
    if isinstance(value, Tensor):
        return [(value, (version_of(value), value.requires_grad))]
    parts = list(_parts(value))
    return [(value, len(parts)), *(seen for part in parts for seen in look_at(part))]


class Trial:
    """Calls a step on a new copy of a microbatch each time, and sees whether it changes it.

    Args:
        run: Calls the step.
        part: The microbatch.

    Attributes:
        has_changed: Whether a call has changed its copy.
    """

    def __init__(self, run: Callable[[Any], Any], part: Any) -> None:
        self._run = run
        self._part = part
        self.has_changed = False

    def __call__(self) -> Any:
        """Call the step."""
        copied = copy_part(self._part)
        before = look_at(copied)
        try:
            return self._run(copied)
        finally:
            self.has_changed |= not is_same_look(before, look_at(copied))


class CallOnCopies:
    """Calls a step on a new copy of a microbatch each time, the last time for hooks to see.

    Args:
        step: The user's step.
        part: The microbatch.
        num_calls: After how many the microbatch is to have what the step has written.
    """

    def __init__(self, step: UsersStep, part: Any, num_calls: int) -> None:
        self._step = step
        self._part = part
        self._num_left = num_calls

    def __call__(self, call: StepCall) -> Any:
        """Call the step; a look at it does not count."""
        copies: dict[int, Any] = {}
        self._num_left -= not call.is_probe
        try:
            return self._step(copy_part(self._part, copies), call)
        finally:
            if not self._num_left and not call.is_probe:
                self._write_back(copies)

    @torch.no_grad()
    def _write_back(self, copies: dict[int, Any]) -> None:
        for value, _ in look_at(self._part):
            copied = copies.get(id(value))
            if isinstance(copied, Tensor) and version_of(copied):
                value.copy_(copied)


def without_shared(part: Any, batch: Any) -> Any:
    """Give a microbatch its own copy of what it has in common with others of its batch."""
    return _copy_some(part, {id(leaf) for leaf in leaves_of(batch) if isinstance(leaf, Tensor)})


def _copy_some(value: Any, wanted: set[int]) -> Any:
    if isinstance(value, Tensor) and id(value) not in wanted:
        return value
    return _copy(value, partial(_copy_some, wanted=wanted))


def _copy(value: Any, inside: Callable[[Any], Any]) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, tuple):
        parts = [*map(inside, value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, (list, deque)):
        found = copy.copy(value)
        found.clear()
        found.extend(map(inside, value))
        return found
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update({name: inside(part) for name, part in value.items()})
        return copied
    return _copy_object(value, inside)


def _copy_object(value: Any, inside: Callable[[Any], Any]) -> Any:
    attributes = _attributes(value)
    if attributes is None:
        return copy.copy(value) if isinstance(value, set) else value
    copied = copy.copy(value)
    for name, part in attributes.items():
        object.__setattr__(copied, name, inside(part))
    return copied


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, deque, set)):
        return value
    return (_attributes(value) or {}).values()


def _attributes(value: Any) -> dict[str, Any] | None:
    if isinstance(value, (type, nn.Module)):
        return None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if is_opaque(value) or callable(value):
        return None
    return getattr(value, "__dict__", None)
