"""Regroups the last W's of a step by parameter, so that gradients become final earlier.

For three microbatches and layers 2, 1 and 0::

    in the plan            W0: 2 1 0   W1: 2 1 0   W2: 2 1 0
    regrouped              2 2 2   1 1 1   0 0 0
                                ^ layer 2 is final
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.weight_grad.queue import WeightGrad, parameters_of


class GradientListener(Protocol):
    """Called when gradients of a step become final; see :class:`.GradientReduction`."""

    def mark_gradients_final(self, stage: int, coming: Iterable[Tensor] = ()) -> None: ...

    def mark_parameter_final(self, parameter: Tensor) -> None: ...


class RegroupedWeightGrads:
    """Weight gradients of several microbatches, grouped by parameter in stable order.

    Args:
        waiting: For each microbatch, the gradients that wait for W, in the order of the backward.
    """

    def __init__(self, waiting: Iterable[Iterable[WeightGrad]]) -> None:
        self._groups: dict[tuple[int, ...], list[Callable[[], None]]] = {}
        self._by_id: dict[int, Tensor] = {}
        for entries in waiting:
            for compute, weights in entries:
                parameters = {id(p): p for weight in weights for p in parameters_of(weight)}
                self._by_id |= parameters
                self._groups.setdefault((*parameters,), []).append(compute)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters, in the order in which they get their last gradient."""
        last = dict.fromkeys(key for group in reversed(self._groups) for key in reversed(group))
        return [self._by_id[key] for key in reversed(last)]

    @torch.no_grad()
    def run(self, finish: Callable[[Tensor], None]) -> None:
        """Compute and accumulate all; call ``finish`` with each parameter that becomes final."""
        left = Counter(key for group in self._groups for key in group)
        for group, computations in self._groups.items():
            computations.reverse()
            while computations:
                computations.pop()()
            left.subtract(group)
            for key in group:
                if not left[key]:
                    finish(self._by_id[key])
