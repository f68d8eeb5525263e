"""What an optimizer keeps in pieces on all replicas, as a checkpoint has it: for whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_pipeoffload.checkpoints.parted_tensor import PartedTensor
from lightning_pipeoffload.checkpoints.scattered_values import shapes_of
from lightning_pipeoffload.checkpoints.value_places import Place, leaves_with_places, map_tensors
from lightning_pipeoffload.optimizers.step_shares import Piece, StepShares
from lightning_pipeoffload.runtime.groups import PipelineGroup

States = dict[str, dict[str, Any]]


class PartedStates:
    """The states of one rank's parameters, of which its counterparts have other pieces.

    Args:
        states: What this replica keeps, by parameter name.
        parameters: The rank's parameters by name.
        shares: What each replica steps with.
        group: This process's groups; its counterparts are in other replicas.

    Attributes:
        own: What this replica keeps, its pieces as pieces of the whole.
    """

    def __init__(
        self,
        states: States,
        parameters: Mapping[str, Tensor],
        shares: StepShares,
        group: PipelineGroup,
    ) -> None:
        self._parameters = parameters
        self._shares = shares
        self._group = group
        self.own: States = {
            name: map_tensors(self._enclosing(name), state) for name, state in states.items()
        }

    def _enclosing(self, name: str) -> Callable[[Place, Tensor], Tensor]:
        """Return what makes a piece of the state of a parameter the whole's."""
        parameter = self._parameters[name]

        def enclose(place: Place, value: Tensor) -> Tensor:
            if not self._shares.is_cut(parameter) or not value.dim():
                return value
            pieces = self._shares.pieces_of(parameter)
            own = next(piece for piece in pieces if piece.replica == self._group.replica)
            if value.shape != (own.end - own.start,):
                raise RuntimeError(
                    f"the optimizer keeps {place[-1]}, of {tuple(value.shape)} elements, for "
                    f"{own.end - own.start} elements of {name}, so its parts on other replicas "
                    f'cannot be put together; set sharding="none"'
                )
            like = value.new_empty(parameter.shape, device="meta")
            return PartedTensor.of(like, pieces, self._group.replica, value)

        return enclose

    def of_all(self) -> States:
        """Return the states as they are on all replicas together; all of them call it.

        Replica 0 has what nobody else has; the rest is to be brought together.
        """
        found = self._group.replicas.gather(shapes_of(self.own, self._group.global_rank))
        states: States = {}
        for name in self._parameters:
            sources = [replica for replica, theirs in enumerate(found) if name in theirs]
            if sources:
                source = sources[0]
                states[name] = map_tensors(self._joining(name, source), found[source][name])
        return states

    def _joining(self, name: str, source: int) -> Callable[[Place, Tensor], Tensor]:
        """Return what finds out where a value is, of which replica ``source`` has told."""
        own = dict(leaves_with_places(self.own.get(name, {})))

        def join(place: Place, shape: Tensor) -> Tensor:
            mine, replica = own.get(place), self._group.replica
            if isinstance(mine, PartedTensor):
                return mine
            parameter = self._parameters[name]
            if self._shares.is_cut(parameter) and shape.dim():
                return PartedTensor.of(shape, self._shares.pieces_of(parameter), replica, None)
            if source == 0:
                return shape if mine is None else mine
            whole = Piece(0, shape.numel(), source)
            return PartedTensor.of(shape, (whole,), replica, mine if replica == source else None)

        return join
