"""A copy of all tensors that an optimizer's step changes, to undo or repeat the step.

Undoing a step by arithmetic does not give the same bits, since float32 rounds Adam's second moment
and sums. So weights ``w`` and optimizer state ``m``, ``v`` are copied before the step::

    before   w  m  v       step         w' m' v'
      |                                   |
      copied ----> w  m  v - restored --> w  m  v      repeated, with clipped gradients: w" m" v"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeoffload.optimizers.master_weights import MasterWeights, is_half
from lightning_pipeoffload.optimizers.narrowed_optimizer import own_members

_NO_STATE: dict[str, Any] = {}
_REMOVED = object()
_CPU = torch.device("cpu")
_MASTER_SIZE = torch.float32.itemsize
_RESERVE = 0.05  # of a device, for memory that torch does not allocate


def supports_snapshot(optimizer: Optimizer) -> bool:
    """Return whether all effects of the optimizer's step are known: it is one of torch's."""
    return is_torch_optimizer(optimizer) and not isinstance(optimizer, torch.optim.LBFGS)


def is_torch_optimizer(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is one of torch's own."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


class OptimizerSnapshot:
    """Weights, state and, if the step writes into them, gradients before an optimizer's step.

    Copies of device tensors are on the device if they fit, else on the host; copies of host tensors
    are on the host.

    Args:
        optimizer: An optimizer for which :func:`supports_snapshot` is true.
        masters: The masters that it steps in place of parameters; None: there are none.
        is_stepped: Whether this process steps a parameter of the optimizer that it has.

    Attributes:
        optimizer: The optimizer.
        has_room: Whether the copies fit on the device; None before the first copies are made.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        masters: MasterWeights | None = None,
        is_stepped: Callable[[Tensor], bool] = lambda parameter: True,
    ) -> None:
        self.optimizer, self._is_stepped = optimizer, is_stepped
        self._masters = masters
        self.has_room: bool | None = None
        self._weights, self._states, self._gradients = _Copies(), _Copies(), _Copies()
        self._changes_gradients = True
        self._branches: list[Any] = []
        self._num_values = 0
        self._changed_states: list[_ChangedState] = []
        self._versions: list[tuple[Tensor, int]] = []

    @torch.no_grad()
    def save(self) -> None:
        """Copy the tensors that the next step may change."""
        groups = self.optimizer.param_groups
        self._stepping = self._parameters_now()
        self._groups = [{name: _copied(value) for name, value in g.items()} for g in groups]
        self._states_before = [dict(self.optimizer.state.get(p, _NO_STATE)) for p in self._stepping]
        num_values = sum(map(len, self._states_before))
        if self.has_room is None or num_values > self._num_values:
            self._check_device_room()  # most optimizers have no state before their first step
        self._num_values = num_values
        on_host = not self.has_room
        self._stepped = [self._stepped_for(p) for p in self._stepping]
        self._weights.save(self._stepped, on_host)
        self._states.save(_tensors_of(self._states_before), on_host)
        self._versions = self._versions_now()
        self._predict_gradient_writes()
        gradients = self._gradients_now()
        self._gradients.save(gradients if self._changes_gradients else [], on_host)

    def save_if_changed(self) -> None:
        """Save again what hooks have changed since."""
        if not _are_same(self._versions, self._versions_now()) or not _are_same(
            [(p, 0) for p in self._stepping], [(p, 0) for p in self._parameters_now()]
        ):
            self.save()

    def record_step_changes(self) -> None:
        """Record, after the step, its writes into gradients and the state that it has created."""
        self._changes_gradients = not _are_same(self._versions, self._versions_now())
        self._versions = []
        states = [self.optimizer.state.get(p, {}) for p in self._stepping]
        changed = zip(self._stepping, self._states_before, states, map(dict, states), strict=True)
        self._changed_states = [_ChangedState(*each) for each in changed]

    def free_gradients(self) -> None:
        """Free the gradients, so that they are gone before the next ones take memory."""
        self._gradients.forget_tensors()

    def tensors_changed_by_undo(self) -> list[Tensor]:
        """Return the tensors whose values change if the step is undone or repeated.

        Among them are the parameters that another replica updates, and would send again.
        """
        states = [self.optimizer.state.get(p, _NO_STATE) for p in self._stepping]
        elsewhere = [p for p in self._own_members() if not self._is_stepped(p)]  # sent again
        return [*self._stepping, *elsewhere, *self._gradients_now(), *_tensors_of(states)]

    @torch.no_grad()
    def undo(self) -> None:
        """Restore parameters and optimizer state; the step is not repeated."""
        with self._keeping_later_changes():
            self._restore()
            for changed in self._changed_states:
                if not changed.before:
                    self.optimizer.state.pop(changed.parameter, None)

    def repeat(self, change_gradients: Callable[[], None]) -> None:
        """Step again, with the options of the undone step, which a hook may have changed since.

        Args:
            change_gradients: A function that changes the gradients to their correct values.
        """
        optimizer = self.optimizer
        with self._keeping_later_changes():
            self._restore()
            change_gradients()
            now, optimizer.param_groups = optimizer.param_groups, self._groups
            try:
                optimizer.step()
            finally:
                optimizer.param_groups = now
            for changed in self._changed_states:
                changed.keep_tensor_identities()

    @torch.no_grad()
    def _restore(self) -> None:
        for changed in self._changed_states:
            changed.restore(self.optimizer.state)
        for copies in (self._weights, self._states, self._gradients):
            copies.restore()
        for parameter, stepped in zip(self._stepping, self._stepped, strict=True):
            if self._masters is not None and stepped is not parameter:
                parameter.copy_(stepped)
                self._masters.put(parameter, stepped)

    def _stepped_for(self, parameter: Tensor) -> Tensor:
        if self._masters is None or not is_half(parameter):
            return parameter
        return self._masters.get_current_master(parameter)

    @contextmanager
    def _keeping_later_changes(self) -> Iterator[None]:
        """Reapply the changes that hooks have made to the state since the step."""
        states = self.optimizer.state
        now = [(each, states.get(each.parameter), each.later()) for each in self._changed_states]
        yield
        for changed, state, later in now:
            if state is None:
                states.pop(changed.parameter, None)
            elif state is not changed.state:
                states[changed.parameter] = state
            else:
                for name, value in later.items():
                    if value is _REMOVED:
                        state.pop(name, None)
                    else:
                        state[name] = value

    def _check_device_room(self) -> None:
        members = self._members()
        device = members[0].device if members else _CPU
        masters = self._masters
        rounded = [p for p in members if masters is not None and is_half(p)]
        copied = [p for p in members if masters is None or not is_half(p)]
        copied += _tensors_of([*self.optimizer.state.values()])
        copied = [tensor for tensor in copied if tensor.device == device]
        there = self._weights.num_bytes(device) + self._states.num_bytes(device)
        num_bytes = sum(tensor.nbytes for tensor in copied) - there
        if masters is not None and not masters.on_host:
            num_bytes += sum(_MASTER_SIZE * p.numel() for p in rounded)
        self.has_room = num_bytes <= _bytes_left(device)

    def _predict_gradient_writes(self) -> None:
        """Copy gradients if the step may take a new branch, which might write into them.

        The branch depends on the options that are zero, and on parameters that step for the first
        time.
        """
        # It does not depend on a tensor's value, for which the host would have to wait.
        options = [[isinstance(v, Tensor) or bool(v) for v in g.values()] for g in self._groups]
        branches = [options, [*map(id, self._stepping)], [*map(len, self._states_before)]]
        self._changes_gradients |= branches != self._branches
        self._branches = branches

    def _parameters_now(self) -> list[Tensor]:
        return [p for p in self._members() if p.grad is not None]

    def _members(self) -> list[Tensor]:
        return [*filter(self._is_stepped, self._own_members())]

    def _own_members(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in own_members(group)]

    def _gradients_now(self) -> list[Tensor]:
        return [p.grad for p in self._stepping if p.grad is not None]

    def _versions_now(self) -> list[tuple[Tensor, int]]:
        return [(gradient, gradient._version) for gradient in self._gradients_now()]


class _ChangedState(NamedTuple):
    """One parameter's state dict before and after a step, without the values of its tensors."""

    parameter: Tensor
    before: dict[str, Any]
    state: dict[str, Any]  # the optimizer's own
    after: dict[str, Any]

    def later(self) -> dict[str, Any]:
        """Return the changes that other code has made to the state since the step."""
        names = dict.fromkeys((*self.after, *self.state))
        now = {name: self.state.get(name, _REMOVED) for name in names}
        return {n: value for n, value in now.items() if value is not self.after.get(n, _REMOVED)}

    def restore(self, states: dict[Tensor, Any]) -> None:
        # In place: other code may iterate over it.
        for name in self.state.keys() - self.before.keys():
            del self.state[name]
        self.state.update(self.before)
        states[self.parameter] = self.state

    @torch.no_grad()
    def keep_tensor_identities(self) -> None:
        """Copy values into the tensors that the step had created, since hooks may refer to them."""
        for name, tensor in self.after.items():
            value = self.state.get(name)
            if isinstance(value, Tensor) and isinstance(tensor, Tensor) and value is not tensor:
                self.state[name] = tensor.copy_(value)


class _Copies:
    """Copies of tensors, in memory that is reused in every step."""

    def __init__(self) -> None:
        self._tensors: Sequence[Tensor] = ()
        self._copies: list[Tensor] = []

    def num_bytes(self, device: torch.device) -> int:
        return sum(copy.nbytes for copy in self._copies if copy.device == device)

    def forget_tensors(self) -> None:
        self._tensors = ()

    def save(self, tensors: Sequence[Tensor], on_host: bool) -> None:
        if not self._can_reuse_copies(tensors, on_host):
            self._copies = []  # freed before new ones are made
            self._copies = [_allocate(tensor, on_host) for tensor in tensors]
        self._tensors = tensors
        _copy(tensors, self._copies)

    def restore(self) -> None:
        _copy(self._copies, self._tensors)

    def _can_reuse_copies(self, tensors: Sequence[Tensor], on_host: bool) -> bool:
        return len(tensors) == len(self._copies) and all(
            a.shape == b.shape
            and a.dtype == b.dtype
            and b.device == (_CPU if on_host else a.device)
            for a, b in zip(tensors, self._copies, strict=True)
        )


def _allocate(tensor: Tensor, on_host: bool) -> Tensor:
    if not on_host or tensor.device == _CPU:
        return torch.empty_like(tensor)
    return torch.empty_like(tensor, device=_CPU, pin_memory=True)


def _bytes_left(device: torch.device) -> float:
    """Return the bytes of a device that no step has used so far."""
    if device.type == "cpu":
        return inf
    return bytes_usable(device) - torch.accelerator.max_memory_reserved(device)


def bytes_usable(device: torch.device) -> float:
    """Return the bytes of a device that are free or used by this process, less a reserve.

    Infinite for the host.
    """
    if device.type == "cpu":
        return inf
    free, total = torch.accelerator.get_memory_info(device)
    return free + torch.accelerator.memory_reserved(device) - _RESERVE * total


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    pairs = list(zip(targets, sources, strict=True))
    # Step counts are on the host: a list with them would need a separate kernel per tensor.
    for on_host in (False, True):
        pairs_of_device = [pair for pair in pairs if (pair[0].device == _CPU) == on_host]
        if pairs_of_device:  # private: one kernel for all of them, as optimizers do it
            torch._foreach_copy_(
                [t for t, _ in pairs_of_device], [s for _, s in pairs_of_device], non_blocking=True
            )


def _are_same(before: list[tuple[Tensor, int]], now: list[tuple[Tensor, int]]) -> bool:
    return len(before) == len(now) and all(
        a is b and version == new for (a, version), (b, new) in zip(before, now, strict=True)
    )


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [*value]
    return value.clone() if isinstance(value, Tensor) else value


def _tensors_of(states: Sequence[dict[str, Any]]) -> list[Tensor]:
    return [v for state in states for v in state.values() if isinstance(v, Tensor)]
