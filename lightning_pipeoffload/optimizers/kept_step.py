"""What an optimizer's step changes, kept so that the step can be taken back and repeated.

No formula leads back: Adam's second moment does not survive float32, and a sum that is taken from
its sum has been rounded twice. So weights and what the optimizer keeps are copied before the step::

    before   w  m  v        step        w' m' v'
      |                                  |
      copied ----> w  m  v --- back ---> w  m  v      repeated, with clipped gradients: w" m" v"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeoffload.optimizers.narrowed_optimizer import own_members

_NONE: dict[str, Any] = {}
_GONE = object()
_CPU = torch.device("cpu")
_RESERVE = 0.05  # of a device, for what is not torch's


class KeptStep:
    """What one optimizer had before its last step.

    The copies are on the device where that has room for them, else on the host.

    Args:
        optimizer: The optimizer, one that :func:`can_keep` takes.

    Attributes:
        optimizer: The optimizer.
        has_room: Whether the device has room for the copies; None before the first are made.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._weights, self._states, self._gradients = _Copies(), _Copies(), _Copies()
        self._changes_gradients = True
        self._branches: list[Any] = []
        self._num_values = 0
        self._made: list[_MadeState] = []
        self._versions: list[tuple[Tensor, int]] = []
        self.has_room: bool | None = None

    def _find_room(self) -> None:
        tensors = [p for group in self.optimizer.param_groups for p in own_members(group)]
        kept = tensors + _tensors_of([*self.optimizer.state.values()])
        device = tensors[0].device if tensors else _CPU
        there = self._weights.num_bytes(device) + self._states.num_bytes(device)
        num_bytes = sum(tensor.nbytes for tensor in kept) - there
        self.has_room = num_bytes <= _bytes_left(device)

    @torch.no_grad()
    def keep(self) -> None:
        """Copy what the next step may change."""
        groups = self.optimizer.param_groups
        self._stepping = self._parameters_now()
        self._groups = [{name: _kept(value) for name, value in g.items()} for g in groups]
        self._kept_states = [dict(self.optimizer.state.get(p, _NONE)) for p in self._stepping]
        num_values = sum(map(len, self._kept_states))
        if self.has_room is None or num_values > self._num_values:
            self._find_room()  # most optimizers have no state before their first step
        self._num_values = num_values
        on_host = not self.has_room
        self._weights.take(self._stepping, on_host)
        self._states.take(_tensors_of(self._kept_states), on_host)
        self._versions = self._versions_now()
        self._notice_branches()
        gradients = self._gradients_now()
        self._gradients.take(gradients if self._changes_gradients else [], on_host)

    def keep_anew(self) -> None:
        """Copy once more what has changed since, where hooks have written into gradients."""
        if not _are_same(self._versions, self._versions_now()) or not _are_same(
            [(p, 0) for p in self._stepping], [(p, 0) for p in self._parameters_now()]
        ):
            self.keep()

    def _notice_branches(self) -> None:
        """Copy gradients where the step may write into them that has not before.

        What a step does depends on which options are zero, and on what steps for the first time.
        """
        # Of a tensor it does not: the host would have to wait for it.
        options = [[isinstance(v, Tensor) or bool(v) for v in g.values()] for g in self._groups]
        branches = [options, [*map(id, self._stepping)], [*map(len, self._kept_states)]]
        self._changes_gradients |= branches != self._branches
        self._branches = branches

    def end_step(self) -> None:
        """See whether the step has written into gradients, which have to be copied then."""
        self._changes_gradients = not _are_same(self._versions, self._versions_now())
        self._versions = []
        states = [self.optimizer.state.get(p, {}) for p in self._stepping]
        made = zip(self._stepping, self._kept_states, states, map(dict, states), strict=True)
        self._made = [_MadeState(*each) for each in made]

    def end(self) -> None:
        """Let go of the gradients, which would take memory beside the next ones."""
        self._gradients.let_go()

    def changed(self) -> list[Tensor]:
        """Return the tensors that are not final until it is known whether the step is."""
        states = [self.optimizer.state.get(p, _NONE) for p in self._stepping]
        return [*self._stepping, *self._gradients_now(), *_tensors_of(states)]

    @torch.no_grad()
    def take_back(self) -> None:
        """Be as before the step, for good."""
        with self._keeping_changes():
            self._put_back()
            for made in self._made:
                if not made.before:
                    self.optimizer.state.pop(made.parameter, None)

    def repeat(self, change_gradients: Callable[[], None]) -> None:
        """Step again by the step's own groups, whatever a hook or scheduler has made of them since.

        Args:
            change_gradients: A function that makes the gradients what they should have been.
        """
        optimizer = self.optimizer
        with self._keeping_changes():
            self._put_back()
            change_gradients()
            now, optimizer.param_groups = optimizer.param_groups, self._groups
            try:
                optimizer.step()
            finally:
                optimizer.param_groups = now
            for made in self._made:
                made.keep_tensors()

    @torch.no_grad()
    def _put_back(self) -> None:
        for made in self._made:
            made.put_back(self.optimizer.state)
        for copies in (self._weights, self._states, self._gradients):
            copies.put_back()

    @contextmanager
    def _keeping_changes(self) -> Iterator[None]:
        """Let what hooks have put into the state since the step be there afterwards."""
        states = self.optimizer.state
        now = [(made, states.get(made.parameter), made.changes()) for made in self._made]
        yield
        for made, state, changes in now:
            if state is None:
                states.pop(made.parameter, None)
            elif state is not made.state:
                states[made.parameter] = state
            else:
                _apply(changes, state)

    def _parameters_now(self) -> list[Tensor]:
        groups = self.optimizer.param_groups
        return [p for group in groups for p in own_members(group) if p.grad is not None]

    def _gradients_now(self) -> list[Tensor]:
        return [p.grad for p in self._stepping if p.grad is not None]

    def _versions_now(self) -> list[tuple[Tensor, int]]:
        return [(gradient, gradient._version) for gradient in self._gradients_now()]


class _MadeState(NamedTuple):
    """What a step has made of one parameter's state, all but the values of its tensors."""

    parameter: Tensor
    before: dict[str, Any]
    state: dict[str, Any]
    after: dict[str, Any]

    def changes(self) -> dict[str, Any]:
        """Return what others have put into the state since the step."""
        names = dict.fromkeys((*self.after, *self.state))
        now = {name: self.state.get(name, _GONE) for name in names}
        return {n: value for n, value in now.items() if value is not self.after.get(n, _GONE)}

    def put_back(self, states: dict[Tensor, Any]) -> None:
        # In place: somebody may be going through it.
        for name in self.state.keys() - self.before.keys():
            del self.state[name]
        self.state.update(self.before)
        states[self.parameter] = self.state

    @torch.no_grad()
    def keep_tensors(self) -> None:
        """Let values be in the tensors in which the step had made them, which hooks may have."""
        for name, tensor in self.after.items():
            value = self.state.get(name)
            if isinstance(value, Tensor) and isinstance(tensor, Tensor) and value is not tensor:
                self.state[name] = tensor.copy_(value)


class _Copies:
    """Copies of tensors, in memory that is the same step after step."""

    def __init__(self) -> None:
        self._tensors: Sequence[Tensor] = ()
        self._copies: list[Tensor] = []

    def num_bytes(self, device: torch.device) -> int:
        return sum(copy.nbytes for copy in self._copies if copy.device == device)

    def let_go(self) -> None:
        self._tensors = ()

    def take(self, tensors: Sequence[Tensor], on_host: bool) -> None:
        if not self._fit(tensors, on_host):
            self._copies = []  # before there are others
            self._copies = [_make_room(tensor, on_host) for tensor in tensors]
        self._tensors = tensors
        _copy(tensors, self._copies)

    def put_back(self) -> None:
        _copy(self._copies, self._tensors)

    def _fit(self, tensors: Sequence[Tensor], on_host: bool) -> bool:
        return len(tensors) == len(self._copies) and all(
            a.shape == b.shape
            and a.dtype == b.dtype
            and b.device == (_CPU if on_host else a.device)
            for a, b in zip(tensors, self._copies, strict=True)
        )


def _make_room(tensor: Tensor, on_host: bool) -> Tensor:
    if not on_host or tensor.device == _CPU:
        return torch.empty_like(tensor)
    return torch.empty_like(tensor, device=_CPU, pin_memory=True)


def _bytes_left(device: torch.device) -> float:
    """Return the bytes of a device that no step has needed so far."""
    if device.type == "cpu":
        return inf
    return bytes_usable(device) - torch.accelerator.max_memory_reserved(device)


def bytes_usable(device: torch.device) -> float:
    """Return the bytes of a device that this process may fill up, but for a reserve.

    They are what is free and what it has; those of the host are not counted.
    """
    if device.type == "cpu":
        return inf
    free, total = torch.accelerator.get_memory_info(device)
    return free + torch.accelerator.memory_reserved(device) - _RESERVE * total


def can_keep(optimizer: Optimizer) -> bool:
    """Whether all that an optimizer's step changes is known: it is one of torch's own.

    Args:
        optimizer: The optimizer; its state holds tensors and numbers alone.
    """
    return is_torchs(optimizer) and not isinstance(optimizer, torch.optim.LBFGS)


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether an optimizer is one of torch's own."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    pairs = list(zip(targets, sources, strict=True))
    # Numbers of steps are on the host: with them in the list each tensor would have its own kernel.
    for on_host in (False, True):
        found = [pair for pair in pairs if (pair[0].device == _CPU) == on_host]
        if found:  # private: one kernel for all of them, as optimizers do it
            torch._foreach_copy_([t for t, _ in found], [s for _, s in found], non_blocking=True)


def _are_same(before: list[tuple[Tensor, int]], now: list[tuple[Tensor, int]]) -> bool:
    return len(before) == len(now) and all(
        a is b and version == new for (a, version), (b, new) in zip(before, now, strict=True)
    )


def _apply(changes: dict[str, Any], state: dict[str, Any]) -> None:
    for name, value in changes.items():
        if value is _GONE:
            state.pop(name, None)
        else:
            state[name] = value


def _kept(value: Any) -> Any:
    if isinstance(value, list):
        return [*value]
    return value.clone() if isinstance(value, Tensor) else value


def _tensors_of(states: Sequence[dict[str, Any]]) -> list[Tensor]:
    return [v for state in states for v in state.values() if isinstance(v, Tensor)]
