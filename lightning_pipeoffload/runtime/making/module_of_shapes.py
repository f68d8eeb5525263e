"""Makes modules whose parameters have no values, to look at what they would need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_pipeoffload.runtime.making.parameter_shape import ParameterShape
from lightning_pipeoffload.runtime.making.registered_parameters import RegisteredParameters
from lightning_pipeoffload.runtime.randomness import forked_randomness
from lightning_pipeoffload.runtime.shapes.step_rules import StepRules


@contextmanager
def making_shapes() -> Iterator[None]:
    """Let the parameters of modules that are made inside be shapes; buffers have values."""
    with forked_randomness(), _Shapes(nn.Module()).following():
        yield


class _Shapes(RegisteredParameters):
    """Takes a shape for every parameter."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.rules = StepRules(observe=_see_nothing)  # where it is observed nothing is drawn
        self._shapes: dict[int, Tensor] = {}

    @override
    def take(self, index: int, parameter: Tensor) -> Tensor:
        if index not in self._shapes:
            name = f"{self.appeared[index].name} of {self.appeared[index].owner}"
            self._shapes[index] = ParameterShape.in_place_of(parameter, name, self)
        return self._shapes[index]

    @override
    def take_copy(self, index: int, parameter: Tensor) -> Tensor | None:
        return self.take(index, parameter)


def _see_nothing(func: Any, args: tuple[Any, ...], result: Any) -> None:
    pass
