"""A step in which other tensors stand in for an optimizer's parameters: masters, or the host's.

They are in the optimizer's groups and state while it computes, and nowhere else::

    hooks before a step          the user's parameters
    step of bucket 0, 1, ...     stand-ins of these parameters     by the class's own step
    step of the last bucket      stand-ins of these parameters     the user's call
    hooks after a step           the user's parameters

An optimizer that needs all its parameters at once has a single bucket. The user's call of ``step``
computes the last bucket, so hooks, schedulers and counters count one step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeoffload.optimizers.master_weights import MasterWeights, is_half
from lightning_pipeoffload.runtime.shapes import ShapeOnly

_ALIGNMENT = 64  # of tensors in a buffer, in bytes


class StandInStep:
    """Steps an optimizer with stand-ins for its parameters.

    Args:
        optimizer: The user's optimizer.
        by_bucket: Whether it may step some of the parameters at a time.
        masters: The masters of its parameters in half precision; None: the optimizer steps these
            themselves.

    Attributes:
        seconds: Seconds that the last step took the host, without waits for gradients; 0 where the
            device steps.
    """

    seconds = 0.0
    _argument = ""

    def __init__(
        self, optimizer: Optimizer, by_bucket: bool, masters: MasterWeights | None
    ) -> None:
        self._optimizer, self._by_bucket, self._masters = optimizer, by_bucket, masters
        self._group_members: list[list[Tensor]] = []
        self._standing: dict[Tensor, Tensor] = {}
        self._state: Any = None

    def begin(self) -> None:
        """Begin a step: its closure runs next."""

    def step_all_but_last_bucket(self) -> None:
        """Step all buckets but the last, which is then in the optimizer's groups."""
        raise NotImplementedError

    def write_back_parameters(self) -> None:
        """Give parameters their new values, after the optimizer has stepped the last bucket."""
        raise NotImplementedError

    def restore(self) -> None:
        """Put the user's parameters back into the optimizer, also after an error in its step."""
        self._restore()

    def _members_with_gradient(self) -> list[Tensor]:
        self._group_members = [group["params"] for group in self._optimizer.param_groups]
        return [p for members in self._group_members for p in members if p.grad is not None]

    def _masters_for(self, parameter: Tensor) -> MasterWeights | None:
        return self._masters if is_half(parameter) else None

    def _stand_in(self, standing: dict[Tensor, Tensor], is_last: bool) -> None:
        """Put a bucket's stand-ins into the optimizer's groups and state."""
        optimizer, self._state = self._optimizer, self._optimizer.state
        self._standing = standing
        state = {other: self._state[p] for p, other in standing.items() if p in self._state}
        if is_last:  # an optimizer may look at all that it keeps
            state |= {p: value for p, value in self._state.items() if p not in standing}
        optimizer.state = defaultdict(dict, state)
        for group, group_members in zip(optimizer.param_groups, self._group_members, strict=True):
            members = [p for p in group_members if p in standing or (is_last and p.grad is None)]
            group["params"] = [standing.get(p, p) for p in members]

    def _restore(self) -> None:
        if not self._standing:
            return
        of_others, parameters = self._optimizer.state, {o: p for p, o in self._standing.items()}
        self._optimizer.state = self._state
        for key, state in of_others.items():
            self._state[parameters.get(key, key)] = state
        for group, members in zip(self._optimizer.param_groups, self._group_members, strict=True):
            group["params"] = members
        self._standing, self._state = {}, None

    def _stand_in_for(self, parameter: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        """Return what is stepped for a parameter: its master, else its value where it steps."""
        masters = self._masters_for(parameter)
        if masters is not None:
            if not masters.has_current_master(parameter):
                masters.update_from_weight(parameter, weight)
            weight, gradient = masters.master_of(parameter), gradient.float()
        stand_in = nn.Parameter(weight, parameter.requires_grad)
        stand_in.__dict__.update(parameter.__dict__)  # an optimizer may go by a user's attribute
        stand_in.grad = gradient
        return stand_in

    def _step_bucket(self) -> None:
        """Step without hooks: torch wraps a class's ``step`` to run them, and marks it so."""
        step: Any = type(self._optimizer).step
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(self._optimizer)

    def _in_buckets(self, parameters: Sequence[Tensor], most_bytes: int) -> Iterator[list[Tensor]]:
        bucket: list[Tensor] = []
        num_bytes = 0
        for parameter in parameters:
            num_bytes += self._bytes_of([parameter])
            if self._by_bucket and bucket and num_bytes > most_bytes:
                yield bucket
                bucket, num_bytes = [], self._bytes_of([parameter])
            bucket.append(parameter)
        if bucket:
            yield bucket

    def _bytes_of(self, parameters: Sequence[Tensor]) -> int:
        return sum(padded_bytes(p) + padded_bytes(self._gradient_of(p)) for p in parameters)

    def _gradient_of(self, parameter: Tensor) -> Tensor:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"{self._argument} steps dense gradients, and one of shape "
                f"{tuple(gradient.shape)} has layout {gradient.layout}; make it dense, with "
                f"sparse=False in nn.Embedding say"
            )
        return gradient


@contextmanager
def loading_stand_in_state(
    optimizer: Optimizer, masters: MasterWeights | None, on_host: bool
) -> Iterator[None]:
    """Make ``load_state_dict`` load state to the place and in the dtype of the step inside.

    By default it moves and casts each tensor to the device and dtype of its parameter.
    """
    replaced = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            is_cast = masters is not None and is_half(p)
            is_moved = on_host and p.device.type != "cpu"
            if not isinstance(p, ShapeOnly) and (is_cast or is_moved):
                replaced.append((p, p.data, p.grad))
                p.grad = None
                dtype = torch.float32 if is_cast else p.dtype
                device = torch.device("cpu") if on_host else p.device
                p.data = torch.empty((), dtype=dtype, device=device).expand(p.shape)
    try:
        yield
    finally:
        for p, value, gradient in replaced:
            p.data = value
            p.grad = gradient


def padded_bytes(tensor: Tensor) -> int:
    """Return the bytes that a tensor takes in a buffer of aligned tensors."""
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
