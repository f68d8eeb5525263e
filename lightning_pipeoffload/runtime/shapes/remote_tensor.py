"""Shape-only tensors that replace the parameters and buffers of other stages."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode
from typing_extensions import Self, override

from lightning_pipeoffload.runtime import replaced
from lightning_pipeoffload.runtime.shapes.quantized_weight import (
    carry_options,
    is_4bit,
    quantize_shape,
    quantize_stand_in_if_4bit,
)
from lightning_pipeoffload.runtime.shapes.remote_gradient import (
    GRADIENT_OF,
    KnownNorms,
    RemoteGradient,
)
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.shapes.sharding import set_sharding, sharding_of
from lightning_pipeoffload.runtime.shapes.step_rules import ValueNeededError
from lightning_pipeoffload.runtime.users_code import Slot, in_brackets, users_line


@dataclass
class GradientChanges:
    """A counter of changes of gradients, shared by all remote parameters of a rank.

    Attributes:
        num_changes: The number of backwards, clippings and calls that set gradients to zero.
        are_none: Whether the last change set all gradients to None.
    """

    num_changes: int = 0
    are_none: bool = True
    _sizes: list[KnownNorms] = field(default_factory=list)

    def invalidate_on_change(self, size: KnownNorms) -> None:
        """Register the norm of another replica's gradient, which is valid until the next change."""
        self._sizes.append(size)

    def record(self, are_none: bool = False) -> None:
        """Count a change of gradients: all known norms become invalid."""
        self.num_changes += 1
        self.are_none = are_none
        while self._sizes:
            self._sizes.pop().expire()


class RemoteTensor(ShapeOnly):
    """A shape that replaces a parameter or buffer of other stages in this rank's module.

    Attributes:
        changes: Shared by all remote parameters of the rank.
        became: The real tensor that has replaced it, once the module is whole again.
        num_became: How many remote tensors of this process have been replaced so far.
    """

    _is_param = False
    _grad: Tensor | None = None
    _changes_seen = 0
    changes = GradientChanges()
    became: Tensor | None = None
    num_became = 0

    @classmethod
    def standing_for(cls, slot: Slot, origin: str, device: torch.device) -> Self:
        """Return a stand-in for the tensor in ``slot``.

        Args:
            slot: A parameter or buffer of the module.
            origin: The name of the tensor, and its stage and rank.
            device: The device on which the rank computes; the module may still be on the host.
        """
        meta = cls.like(slot.tensor, origin).meta
        stand_in = cls.like_weight(slot.tensor, meta, device, origin)
        # Private: isinstance(_, nn.Parameter) reads it.
        stand_in._is_param = slot.kind == "_parameters"
        quantize_stand_in_if_4bit(stand_in, slot)
        return stand_in

    @classmethod
    def like_weight(cls, tensor: Tensor, meta: Tensor, device: torch.device, origin: str) -> Self:
        """Make a shape like ``tensor``; it is a ``Params4bit`` too for a 4-bit weight."""
        kind = remote_subclass_of(cls, type(tensor)) if is_4bit(tensor) else cls
        shape = kind(meta, device, frozenset((origin,)), tensor.requires_grad)
        if is_4bit(tensor):
            carry_options(shape, tensor)
        sharding = sharding_of(tensor)
        if sharding is not None:
            set_sharding(shape, sharding)
        return shape

    def on_device(self, device: torch.device) -> RemoteTensor:
        """Return the same shape on another device."""
        (origin,) = self.origins
        kind = getattr(self, "pickled_kind", type(self))
        shape: RemoteTensor = kind.like_weight(self, self.meta, device, origin)
        shape._is_param = self._is_param
        return shape

    @override
    def update_origins_on_write(self, origins: frozenset[str]) -> None:
        """Do nothing: the owner runs the same write, so the tensor has the same origins."""

    def share_changes(self, changes: GradientChanges) -> None:
        """Set the changes that all remote parameters of the rank share."""
        self.changes = changes

    def record_replacement(self, tensor: Tensor) -> None:
        """Remember the real tensor that replaces it, for optimizers that hold it."""
        self.became = tensor
        RemoteTensor.num_became += 1

    @property
    def grad(self) -> Tensor | None:
        """The gradient as a shape, with its norm once the ranks have exchanged norms."""
        if self._changes_seen != self.changes.num_changes:
            self.set_remote_gradient(not self.changes.are_none and self.requires_grad)
        return self._grad

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        self._grad = gradient
        self._changes_seen = self.changes.num_changes

    def set_remote_gradient(self, is_there: bool, size: KnownNorms | None = None) -> None:
        """Set ``grad`` to a shape-only gradient, with its norm if ``size`` is known, or to None."""
        self.grad = RemoteGradient.of(self, size) if is_there else None

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteTensor:
        copied = type(self)(self.meta, self.device, self.origins, self.requires_grad)
        copied._is_param = self._is_param
        if is_4bit(self):
            carry_options(copied, self)
        memo[id(self)] = copied
        return copied


@cache
def remote_subclass_of(kind: type[RemoteTensor], parameter: type[Tensor]) -> type[Any]:
    """Return a subclass of both ``kind`` and ``parameter``, a class such as ``Params4bit``.

    peft and transformers find ``Params4bit`` by class and by name.
    """
    if issubclass(parameter, RemoteTensor):
        parameter = parameter.parameter_kind  # type: ignore[attr-defined]

    class Remote(kind, parameter):  # type: ignore[valid-type,misc]
        parameter_kind = parameter
        pickled_kind = kind

        def to(self, *args: Any, **kwargs: Any) -> Tensor:
            """Move the shape; if it is of an unquantized 4-bit weight, quantize it."""
            device: Any = kwargs.get("device", args[0] if args else None)
            is_full = not getattr(self, "bnb_quantized", True)
            moves = isinstance(device, str | int | torch.device)
            if is_full and moves and torch.device(device).type != "meta":
                quantize_shape(self, self)
                self.module.quant_state = self.quant_state
                return self
            return Tensor.to(self, *args, **kwargs)

    Remote.__name__ = parameter.__name__
    return Remote


def remote_read_message(error: ValueNeededError) -> str:
    """Return the error message for a hook or script that reads a value of another rank."""
    advice = (
        "its 2-norm and largest absolute value are on every rank in on_after_backward, "
        "on_before_optimizer_step and configure_gradient_clipping, where your module or callback "
        "overrides one of these, and stay so until it is clipped or written: compute it there; or "
        "call trainer.strategy.gather(parameter.grad) on all ranks to have its value"
        if any(origin.startswith(GRADIENT_OF) for origin in error.origins)
        else "call trainer.strategy.gather(parameter) on all ranks to have its value, or "
        "lightning_pipeoffload.save_pretrained(module, folder) to save adapters; for an average "
        "of the weights use Lightning's callback EMAWeightAveraging(), or start from "
        "copy.deepcopy(module) in on_fit_start, of which each rank averages its part"
    )
    return f"{error}{in_brackets(users_line(error))}, which is not on this rank: {advice}"


# torch redraws values outside of the bounds, so the number of draws depends on values.
# Private: trunc_normal_ calls it, under whichever name that was imported.
_draw = init._no_grad_trunc_normal_


def _draw_anywhere(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Draw and discard the random numbers for a tensor without a value."""
    if not isinstance(tensor, ShapeOnly):
        return _draw(tensor, *args, **kwargs)
    _draw(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), *args, **kwargs)
    with torch.no_grad():
        return tensor.zero_()  # a write, for observers


def trunc_normal_on_shapes() -> AbstractContextManager[None]:
    """Make ``trunc_normal_`` accept tensors without a value within the context."""
    return replaced(init, "_no_grad_trunc_normal_", _draw_anywhere)


class EqualIsSame(TorchFunctionMode):
    """Makes ``torch.equal`` compare identity.

    Lightning's BaseFinetuning uses it to find the parameters that an optimizer already has. Their
    values may be on other ranks, and two new norm layers have equal values.
    """

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.equal:
            return args[0] is args[1]
        return func(*args, **(kwargs or {}))
