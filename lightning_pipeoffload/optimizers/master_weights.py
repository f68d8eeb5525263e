"""Float32 copies, on the host, of parameters in half precision; the optimizer steps the copies.

A parameter is its master, rounded. Code that writes to parameters between two steps writes to the
rounded ones: where those no longer are the master's, the master takes their value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime.stored_tensor import read_stored, value_of

_HALF = (torch.bfloat16, torch.float16)


def is_half(parameter: Tensor) -> bool:
    """Whether a parameter has a type that masters are kept for."""
    return parameter.dtype in _HALF


class MasterWeights:
    """The masters of one rank's parameters; of those that never stepped there are none."""

    def __init__(self) -> None:
        self._masters: dict[Tensor, Tensor] = {}
        self._versions: dict[Tensor, int] = {}
        self._loaded: dict[str, Any] = {}

    def expect(self, state: Mapping[str, Any]) -> None:
        """Keep the values that a module is loaded from; its parameters round them."""
        self._loaded = {k: v for k, v in state.items() if isinstance(v, Tensor)}

    def read(self) -> None:
        """Read what is still in a checkpoint's file."""
        self._loaded = read_stored(self._loaded)

    def begin(self, own: Mapping[str, Tensor]) -> None:
        """Begin with what was loaded.

        Args:
            own: The parameters that this process steps, by name.
        """
        for name, parameter in own.items():
            if name in self._loaded and is_half(parameter) and parameter.requires_grad:
                self._masters[parameter] = value_of(self._loaded[name]).float()
                self._versions.pop(parameter, None)
        self._loaded = {}

    def has(self, parameter: Tensor) -> bool:
        """Whether the master is known, and nothing has written to the parameter since."""
        return self._versions.get(parameter) == parameter._version

    def of(self, parameter: Tensor) -> Tensor:
        """Return the master of a parameter for which :meth:`has` is true."""
        return self._masters[parameter]

    def current(self, parameter: Tensor) -> Tensor:
        """Return the master of a parameter in half precision, made now if there is none."""
        if not self.has(parameter):
            self.follow(parameter, parameter.detach().cpu())
        return self._masters[parameter]

    @torch.no_grad()
    def follow(self, parameter: Tensor, weight: Tensor) -> None:
        """Give the master the parameter's value where it is not the master's.

        Args:
            parameter: The parameter.
            weight: Its value, on the host.
        """
        self.put(parameter, _joined(self._masters.get(parameter), weight))

    def put(self, parameter: Tensor, master: Tensor) -> None:
        """Set the master of a parameter that has its value, or is about to get it."""
        self._masters[parameter] = master
        self.note(parameter)

    def note(self, parameter: Tensor) -> None:
        """Note that a parameter has its master's value now."""
        self._versions[parameter] = parameter._version

    @torch.no_grad()
    def replace_in(self, state: dict[str, Any], module: nn.Module) -> None:
        """Replace, in a module's state dict, parameters by their masters."""
        for name, parameter in module.state_dict(keep_vars=True).items():
            if name not in state or not isinstance(parameter, Tensor) or not is_half(parameter):
                continue
            if parameter in self._masters:
                state[name] = self.current(parameter)
            elif name in self._loaded and type(parameter) is nn.Parameter:
                loaded = value_of(self._loaded[name]).float()
                state[name] = _joined(loaded, parameter.detach().cpu())


def _joined(master: Tensor | None, weight: Tensor) -> Tensor:
    if master is None:
        return weight.float()
    return torch.where(master.to(weight.dtype) == weight, master, weight.float())
