"""One optimizer's step, and what it keeps, shared out over the replicas of a rank.

Each parameter is laid out flat and cut in equal pieces, or goes as a whole where the optimizer
needs whole tensors. A replica steps with its pieces, in the memory of the parameters that they are
of; then all get what each has made of them::

    mean of the gradients  [ embed      ][ layer        ][ head       ]  on every replica
    step of replica 0      [ embed]      [ layer ]       [ head ]        what it keeps: of these
    step of replica 1            [embed ]       [ layer ]      [ head ]  what it keeps: of these
    weights                [ embed      ][ layer        ][ head       ]  on every replica
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime.buckets import Bundle, in_buckets
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.leaves import map_operands
from lightning_pipeoffload.runtime.replicas import Replicas

# Pieces begin at multiples of what vectorized kernels take at once, so that the bits of an element
# are those that it has in the whole tensor.
_UNIT = 64


class Piece(NamedTuple):
    """Elements of a tensor laid out flat, and the replica that has them."""

    start: int
    end: int
    replica: int


class StepShares:
    """What each replica steps with.

    Args:
        group: This process's groups; its counterparts are in other replicas.
        cuts: Whether parameters are cut; else each is stepped with as a whole.

    Attributes:
        cuts: Whether parameters are cut.
    """

    def __init__(self, group: PipelineGroup, cuts: bool) -> None:
        self._group = group
        self.cuts = cuts
        self._pieces: dict[Tensor, list[Piece]] = {}
        self._own: dict[Tensor, Piece] = {}
        self._loads = [0] * group.num_replicas
        self._lent: dict[Tensor, nn.Parameter] = {}  # for good: an optimizer may know them by id
        self._is_lent: list[Tensor] = []
        self._stepping: dict[Tensor, None] = {}

    @property
    def num_replicas(self) -> int:
        """Over how many replicas the step is shared out."""
        return len(self._loads)

    def take_on(self, parameters: Iterable[Tensor]) -> None:
        """Decide who steps with parameters that are new: the largest first, to who has least.

        All replicas have them in the same order, so they decide alike.
        """
        new = [p for p in parameters if p not in self._pieces]
        for parameter in sorted(new, key=lambda p: (not p.requires_grad, -p.nbytes)):
            by_load = sorted(range(self.num_replicas), key=self._loads.__getitem__)
            cuts = zip(self._cut(parameter), by_load, strict=False)
            self._pieces[parameter] = [Piece(*cut, replica) for cut, replica in cuts]
            for piece in self._pieces[parameter]:
                self._loads[piece.replica] += (piece.end - piece.start) * parameter.element_size()
                if piece.replica == self._group.replica:
                    self._own[parameter] = piece

    def _cut(self, parameter: Tensor) -> list[tuple[int, int]]:
        num = parameter.numel()
        if not self.cuts or not parameter.is_contiguous() or num <= _UNIT:
            return [(0, num)]
        size = -(-num // (self.num_replicas * _UNIT)) * _UNIT
        return [(start, min(start + size, num)) for start in range(0, num, size)]

    def is_cut(self, parameter: Tensor) -> bool:
        """Whether several replicas have a piece of a parameter."""
        return len(self._pieces[parameter]) > 1

    def pieces_of(self, parameter: Tensor) -> Sequence[Piece]:
        """Return the pieces of a parameter, in order."""
        return self._pieces[parameter]

    def own_state(self, parameter: Tensor, state: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return what of a whole parameter's state is this replica's; None where nothing is."""
        piece = self._own.get(parameter)
        if piece is None or not self.is_cut(parameter):
            return None if piece is None else state

        def cut(value: Any) -> Any:
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                return value.reshape(-1)[piece.start : piece.end].clone()
            return value

        found: Mapping[str, Any] = map_operands(cut, state)
        return found

    def start_step(self) -> None:
        """Forget what a step before was of, which may have ended in an error."""
        self._stepping.clear()

    def lend(
        self, parameters: Sequence[Tensor], state: MutableMapping[Tensor, Any]
    ) -> list[Tensor]:
        """Return what this replica steps with instead of some parameters.

        Args:
            parameters: The parameters of one group.
            state: The optimizer's state, which is of what is lent until that is taken back.
        """
        self.take_on(parameters)
        # What neither trains nor has a gradient is not changed, and need not travel.
        stepping = [p for p in parameters if p.requires_grad or p.grad is not None]
        self._stepping.update(dict.fromkeys(stepping))
        return [self._lend(p, state) for p in stepping if p in self._own]

    def _lend(self, parameter: Tensor, state: MutableMapping[Tensor, Any]) -> Tensor:
        if not self.is_cut(parameter):
            return parameter
        piece = self._own[parameter]
        values = _values_of(parameter, piece)
        lent = self._lent.setdefault(parameter, nn.Parameter(values))
        lent.data = values  # the parameter's may be others than in the last step
        if parameter.grad is not None:
            lent.grad = parameter.grad.reshape(-1)[piece.start : piece.end]
        if parameter in state:
            state[lent] = state.pop(parameter)
        self._is_lent.append(parameter)
        return lent

    @torch.no_grad()
    def take_back(self, state: MutableMapping[Tensor, Any]) -> None:
        """Take back what was lent, as it is now."""
        for parameter in self._is_lent:
            lent = self._lent[parameter]
            values = _values_of(parameter, self._own[parameter])
            if lent.data_ptr() != values.data_ptr():  # of an optimizer that has made new ones
                values.copy_(lent)
            lent.grad = None
            if lent in state:
                state[parameter] = state.pop(lent)
        self._is_lent.clear()

    def gather(self) -> None:
        """Let all replicas have what each has made of its pieces; all of them call it.

        They are under way then, as :class:`WeightsUnderWay` says.
        """
        replicas = self._group.replicas
        copies = [
            _Copy(replicas, replica, values)
            for replica in range(self.num_replicas)
            for values in self._values_by_bucket(replica)
        ]

        def end() -> None:
            for copy in copies:
                copy.end()

        replicas.under_way.add(end, self._stepping)

    def _values_by_bucket(self, replica: int) -> Iterable[list[Tensor]]:
        values = [
            _values_of(parameter, piece)
            for parameter in self._stepping
            for piece in self._pieces[parameter]
            if piece.replica == replica and piece.start < piece.end
        ]
        buckets = in_buckets(dict(enumerate(values)))
        return ([values[number] for number in bucket] for bucket in buckets)


class _Copy:
    """Values that travel from one replica to all.

    Args:
        replicas: The replicas.
        source: The replica that has them.
        values: The memory of the values, on each replica.
    """

    def __init__(self, replicas: Replicas, source: int, values: list[Tensor]) -> None:
        self._is_received = source != replicas.own
        self._bundle = Bundle(values)
        self._wait = replicas.start_copy(self._bundle.flat, source)

    def end(self) -> None:
        """Wait for them, and let them be where they belong."""
        self._wait()
        if self._is_received:
            self._bundle.unpack()


def _values_of(parameter: Tensor, piece: Piece) -> Tensor:
    """Return a piece of a parameter, in its memory."""
    whole = parameter.detach()
    if piece.end - piece.start == whole.numel():
        return whole
    return whole.view(-1)[piece.start : piece.end]
