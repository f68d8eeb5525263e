"""A parameter without a value, in a module that is being made."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from lightning_pipeoffload.runtime.shapes.remote_tensor import RemoteTensor

aten = torch.ops.aten


class Registry(Protocol):
    """Who knows the parameters of a module that is being made."""

    def copy(self, parameter: Tensor, memo: dict[int, Any]) -> Tensor:
        """Return a deep copy of a parameter."""


class ParameterShape(RemoteTensor):
    """A parameter whose value nobody needs on this rank, or that is not known yet.

    Code that makes modules draws, copies and computes with it as with any other.

    Attributes:
        registry: Of the parameters that are being made.
        stands_in_for: The parameter in whose place ``module.to_empty`` puts this one.
    """

    registry: Registry | None = None
    stands_in_for: ParameterShape | None = None

    @classmethod
    def in_place_of(cls, parameter: Tensor, origin: str, registry: Registry) -> ParameterShape:
        """Return a shape with a memory of its own.

        Args:
            parameter: Whose shape it has.
            origin: Names it.
            registry: Of the parameters that are being made.
        """
        meta = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta"
        )
        made = cls(meta, parameter.device, frozenset((origin,)), parameter.requires_grad)
        made._is_param = True  # private: see RemoteTensor
        made.registry = registry
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Do as any shape, but give what is alike where no value is asked for.

        ``nn.Parameter(parameter)`` wants it so, and ``module.to_empty`` would make values.
        """
        first = args[0] if args else None
        if func is aten.empty_like.default and isinstance(first, ParameterShape):
            return first._empty(func, kwargs or {})
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is aten.detach.default and isinstance(first, ParameterShape):
            result = ParameterShape(result.meta, result.device, result.origins)
            if first.stands_in_for is not None:
                result._stand_in_for(first.stands_in_for)
        return result

    def _empty(self, func: torch._ops.OpOverload, options: dict[str, Any]) -> ParameterShape:
        device = torch.device(options.get("device") or self.device)
        meta = func(self.meta, **{**options, "device": "meta"})
        made = ParameterShape(meta, device, self.origins)
        made._stand_in_for(self)
        return made

    def _stand_in_for(self, parameter: ParameterShape) -> None:
        self.stands_in_for = parameter
        self.registry = parameter.registry

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteTensor:
        if self.registry is None:
            return super().__deepcopy__(memo)
        copied = self.registry.copy(self, memo)
        assert isinstance(copied, RemoteTensor)
        return copied
