"""An optimizer like the user's at work on small tensors, with gradients that are made up."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeoffload.optimizers.copy import optimizer_like
from lightning_pipeoffload.optimizers.narrowed_optimizer import narrow_steps
from lightning_pipeoffload.optimizers.optimizer_state import forget_states
from lightning_pipeoffload.runtime.leaves import leaves_of, tensors_in
from lightning_pipeoffload.runtime.randomness import seed_all
from lightning_pipeoffload.runtime.shapes.foreign_tensor import ForeignTensor, GradientAge

# Matrices, as some optimizers take nothing else; their halves are multiples of what vectorized
# kernels take at once, so that an element's bits do not depend on its place.
_SIDE = 64
# One tensor's gradients are so many times the other's.
_RATIO = 1e3
PLACES = (0, 1)


class OptimizedValues(NamedTuple):
    """What a step has left of one of the tensors, in each group.

    Attributes:
        values: The values of the tensors, of two halves as one.
        others: What the optimizer keeps for them, and how often it has asked for gradients.
        is_by_element: Whether what it keeps for a tensor are numbers, and tensors of its shape.
    """

    values: list[Tensor]
    others: list[Any]
    is_by_element: bool


class OptimizerCandidate:
    """An optimizer like the user's, of two small tensors in each group.

    Args:
        optimizer: The user's optimizer.
        device: The device of the tensors.
        is_sparse: Whether their gradients are sparse.
        in_halves: Whether each tensor is two parameters, its elements laid out flat.
        own: Which of the two tensors it keeps, as a rank keeps its own parameters.
    """

    def __init__(
        self,
        optimizer: Any,
        device: torch.device,
        is_sparse: bool,
        in_halves: bool = False,
        own: tuple[int, ...] = PLACES,
    ) -> None:
        self._device = device
        self._is_sparse = is_sparse
        self._in_halves = in_halves
        self._own = own
        self._places: dict[Tensor, int] = {}
        self._optimizer = optimizer_like(optimizer, self._make_members)
        if own != PLACES:
            self._leave_to_others()
        self._num_evaluations = 0
        if hasattr(self._optimizer, "train"):  # of one that keeps other weights for evaluation
            self._optimizer.train()

    def _make_members(self, dtype: torch.dtype) -> list[nn.Parameter]:
        made = []
        for place in PLACES:
            value = _spread_values(place).to(self._device, dtype)
            for part in value.view(-1).chunk(2) if self._in_halves else [value]:
                made.append(nn.Parameter(part.clone()))
                self._places[made[-1]] = place
        return made

    def _leave_to_others(self) -> None:
        """Narrow the optimizer to its own tensors, as over ranks."""
        for group in self._optimizer.param_groups:
            group["params"] = [
                p if self._places[p] in self._own else ForeignTensor.like(p, "of another rank")
                for p in group["params"]
            ]
        forget_states(self._optimizer, lambda p: self._places.get(p, -1) not in self._own)
        narrow_steps(self._optimizer, GradientAge())

    def step(self, scale: float) -> dict[int, OptimizedValues]:
        """Take a step with gradients of this scale; return what it has left of each place."""
        seed_all(0)
        self._optimizer.step(closure=lambda: self._evaluate(scale))
        return {place: self._kept(place) for place in self._own}

    def _evaluate(self, scale: float) -> Tensor:
        self._num_evaluations += 1
        for parameter, place in self._places.items():
            if place in self._own:
                gradient = _gradient_of(parameter.detach()) * scale * _RATIO**place
                parameter.grad = _sparse(gradient) if self._is_sparse else gradient
        # As in training it is known with the last stage only: where one of the two is.
        return torch.tensor(scale if 0 in self._own else 0.0, device=self._device)

    def _kept(self, place: int) -> OptimizedValues:
        state = self._optimizer.state
        members = [p for p in state if self._places.get(p) == place]
        by_element = all(_is_by_element(state[p], p.shape) for p in members)
        kept = OptimizedValues([], [self._num_evaluations], by_element)
        for group in self._optimizer.param_groups:
            parts = [p for p in group["params"] if self._places.get(p) == place]
            kept.values.append(torch.cat([part.detach().reshape(-1) for part in parts]))
            options = [value for name, value in group.items() if name != "params"]
            states = [state[part] for part in parts if part in state]
            kept.others.extend(_copies([options, states]))
        return kept


def _is_by_element(state: Any, shape: torch.Size) -> bool:
    return all(not leaf.dim() or leaf.shape == shape for leaf in tensors_in(state))


def _spread_values(place: int) -> Tensor:
    """Return a matrix whose elements differ, of any rank and without drawing random numbers."""
    counted = torch.arange(_SIDE * _SIDE, dtype=torch.float64).view(_SIDE, _SIDE)
    return (counted * 0.6180339887 + 0.3 * place) % 1 - 0.5


def _gradient_of(value: Tensor) -> Tensor:
    """Return what depends on each element alone, to the bit, and stays small."""
    return value / (1 + value.abs().square())


def _sparse(value: Tensor) -> Tensor:
    """Return a matrix as an embedding's gradient: of some rows, here of all."""
    rows = torch.arange(len(value), device=value.device)
    return torch.sparse_coo_tensor(rows[None], value, value.shape)


def _copies(tree: Any) -> list[Any]:
    leaves = (leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves_of(tree))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor | float | int | str)]
