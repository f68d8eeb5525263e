"""What an optimizer's step changes, kept so that the step can be taken back and repeated.

No formula leads back: Adam's second moment does not survive float32, and a sum that is taken from
its sum has been rounded twice. So weights and what the optimizer keeps are copied before the step::

    before   w  m  v        step        w' m' v'
      |                                  |
      copied ----> w  m  v --- back ---> w  m  v      repeated, with clipped gradients: w" m" v"
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeoffload.optimizers.narrowed_optimizer import own_members

_NONE: dict[str, Any] = {}
_CPU = torch.device("cpu")
_RESERVE = 0.05  # of a device, for what is not torch's


class KeptStep:
    """What one optimizer had before its last step.

    The copies are on the device where that has room for them, else on the host.

    Args:
        optimizer: The optimizer, one that :func:`can_keep` takes.

    Attributes:
        has_room: Whether the device has room for the copies; None until that was asked.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._weights, self._states, self._gradients = _Copies(), _Copies(), _Copies()
        self._changes_gradients = True
        self._versions: list[int] = []
        self.has_room: bool | None = None

    def find_room(self) -> bool:
        """Find out whether the device has room for the copies beside what a step has needed."""
        tensors = [p for group in self._optimizer.param_groups for p in own_members(group)]
        kept = tensors + _tensors_of([*self._optimizer.state.values()])
        num_bytes = sum(tensor.nbytes for tensor in kept)
        self.has_room = num_bytes <= _bytes_left(tensors[0].device if tensors else _CPU)
        return self.has_room

    @torch.no_grad()
    def keep(self) -> None:
        """Copy what the next step may change."""
        if self.has_room is None:
            self.find_room()
        groups = self._optimizer.param_groups
        self._stepping = [p for group in groups for p in own_members(group) if p.grad is not None]
        self._options = [{k: _kept(v) for k, v in g.items() if k != "params"} for g in groups]
        self._kept_states = [dict(self._optimizer.state.get(p, _NONE)) for p in self._stepping]
        on_host = not self.has_room
        self._weights.take(self._stepping, on_host)
        self._states.take(_tensors_of(self._kept_states), on_host)
        gradients = self._gradients_now()
        self._versions = [gradient._version for gradient in gradients]
        self._gradients.take(gradients if self._changes_gradients else [], on_host)

    def end_step(self) -> None:
        """See whether the step has written into gradients, which have to be copied then."""
        after = [gradient._version for gradient in self._gradients_now()]
        self._changes_gradients = after != self._versions

    def changed(self) -> list[Tensor]:
        """Return the tensors that are not final until it is known whether the step is."""
        states = [self._optimizer.state.get(p, _NONE) for p in self._stepping]
        return [*self._stepping, *self._gradients_now(), *_tensors_of(states)]

    @torch.no_grad()
    def take_back(self) -> None:
        """Be as before the step."""
        states = self._optimizer.state
        for parameter, kept in zip(self._stepping, self._kept_states, strict=True):
            if kept:
                states[parameter].clear()
                states[parameter].update(kept)
            else:
                states.pop(parameter, None)
        for copies in (self._weights, self._states, self._gradients):
            copies.put_back()

    def repeat(self) -> None:
        """Step again by the step's own rates, whatever a scheduler has made of them since."""
        with self._its_options():
            self._optimizer.step()

    @contextmanager
    def _its_options(self) -> Iterator[None]:
        groups = self._optimizer.param_groups
        now = [{name: value for name, value in g.items() if name != "params"} for g in groups]
        for group, kept in zip(groups, self._options, strict=True):
            group.update(kept)
        try:
            yield
        finally:
            for group, options in zip(groups, now, strict=True):
                group.update(options)

    def _gradients_now(self) -> list[Tensor]:
        return [p.grad for p in self._stepping if p.grad is not None]


class _Copies:
    """Copies of tensors, in memory that is the same step after step."""

    def __init__(self) -> None:
        self._tensors: Sequence[Tensor] = ()
        self._copies: list[Tensor] = []

    def take(self, tensors: Sequence[Tensor], on_host: bool) -> None:
        if not self._fit(tensors):
            self._copies = [_make_room(tensor, on_host) for tensor in tensors]
        self._tensors = tensors
        _copy(tensors, self._copies)

    def put_back(self) -> None:
        _copy(self._copies, self._tensors)

    def _fit(self, tensors: Sequence[Tensor]) -> bool:
        return len(tensors) == len(self._copies) and all(
            a.shape == b.shape and a.dtype == b.dtype
            for a, b in zip(tensors, self._copies, strict=True)
        )


def _make_room(tensor: Tensor, on_host: bool) -> Tensor:
    if not on_host or tensor.device == _CPU:
        return torch.empty_like(tensor)
    return torch.empty_like(tensor, device=_CPU, pin_memory=True)


def _bytes_left(device: torch.device) -> float:
    """Return the bytes of a device that no step has needed so far, but for a reserve."""
    if device.type == "cpu":
        return inf
    _, total = torch.accelerator.get_memory_info(device)
    return (1 - _RESERVE) * total - torch.accelerator.max_memory_reserved(device)


def can_keep(optimizer: Optimizer) -> bool:
    """Whether all that an optimizer's step changes is known: it is one of torch's own.

    Args:
        optimizer: The optimizer; its state holds tensors and numbers alone.
    """
    return type(optimizer).__module__.startswith("torch.optim.") and not isinstance(
        optimizer, torch.optim.LBFGS
    )


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    if sources:  # private: one kernel for all of them, as optimizers do it
        torch._foreach_copy_([*targets], [*sources], non_blocking=True)


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _tensors_of(states: Sequence[dict[str, Any]]) -> list[Tensor]:
    return [v for state in states for v in state.values() if isinstance(v, Tensor)]
