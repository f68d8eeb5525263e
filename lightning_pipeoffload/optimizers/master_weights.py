"""Float32 copies of parameters in half precision, on the host or next to them; they are stepped.

A parameter is its rounded master. Code that writes parameters between two steps writes the rounded
values: where a parameter no longer equals its rounded master, its value is copied to the master.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime import read_stored, value_of

_HALF = (torch.bfloat16, torch.float16)


def is_half(parameter: Tensor) -> bool:
    """Return whether a parameter has a dtype that needs a master."""
    return parameter.dtype in _HALF


class MasterWeights:
    """The masters of one rank's parameters, for those that have been stepped.

    Args:
        on_host: Whether masters are on the host; else they are on the device of their parameters.

    Attributes:
        on_host: The same.
    """

    def __init__(self, on_host: bool = True) -> None:
        self.on_host = on_host
        self._masters: dict[Tensor, Tensor] = {}
        self._versions: dict[Tensor, int] = {}
        self._loaded: dict[str, Any] = {}

    def keep_loaded(self, state: Mapping[str, Any]) -> None:
        """Record the values that a module is loaded from, which its parameters round."""
        self._loaded = {k: v for k, v in state.items() if isinstance(v, Tensor)}

    def read_loaded_values(self) -> None:
        """Read the values that are still in a checkpoint's file."""
        self._loaded = read_stored(self._loaded)

    def make_loaded_masters(self, parameters: Mapping[str, Tensor]) -> None:
        """Make masters of the loaded values.

        Args:
            parameters: The parameters that this process steps, by name.
        """
        for name, parameter in parameters.items():
            if name in self._loaded and is_half(parameter) and parameter.requires_grad:
                loaded = value_of(self._loaded[name]).float()
                self._masters[parameter] = loaded if self.on_host else loaded.to(parameter.device)
                self._versions.pop(parameter, None)
        self._loaded = {}

    def has_current_master(self, parameter: Tensor) -> bool:
        """Return whether there is a master and the parameter was not written since."""
        return self._versions.get(parameter) == parameter._version

    def master_of(self, parameter: Tensor) -> Tensor:
        """Return the master of a parameter for which :meth:`has_current_master` is true."""
        return self._masters[parameter]

    def get_current_master(self, parameter: Tensor) -> Tensor:
        """Return the master of a parameter in half precision; make it if there is none."""
        if not self.has_current_master(parameter):
            value = parameter.detach()
            self.update_from_weight(parameter, value.cpu() if self.on_host else value)
        return self._masters[parameter]

    @torch.no_grad()
    def update_from_weight(self, parameter: Tensor, weight: Tensor) -> None:
        """Update the elements of the master whose rounded values differ from the parameter.

        Args:
            parameter: The parameter.
            weight: Its value, where masters are.
        """
        self.put(parameter, _merge_master(self._masters.get(parameter), weight))

    def put(self, parameter: Tensor, master: Tensor) -> None:
        """Set the master of a parameter that has its value, or is about to get it."""
        self._masters[parameter] = master
        self.record_version(parameter)

    def record_version(self, parameter: Tensor) -> None:
        """Record that a parameter now equals its rounded master."""
        self._versions[parameter] = parameter._version

    @torch.no_grad()
    def replace_in_state_dict(self, state: dict[str, Any], module: nn.Module) -> None:
        """Replace parameters in a module's state dict with their masters."""
        for name, parameter in module.state_dict(keep_vars=True).items():
            if name not in state or not isinstance(parameter, Tensor) or not is_half(parameter):
                continue
            if parameter in self._masters:
                state[name] = self.get_current_master(parameter)
            elif name in self._loaded and type(parameter) is nn.Parameter:
                loaded = value_of(self._loaded[name]).float()
                state[name] = _merge_master(loaded, parameter.detach().cpu())


def _merge_master(master: Tensor | None, weight: Tensor) -> Tensor:
    if master is None:
        return weight.float()
    return torch.where(master.to(weight.dtype) == weight, master, weight.float())
