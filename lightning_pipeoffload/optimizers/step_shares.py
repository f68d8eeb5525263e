"""One optimizer's step, and what it keeps, shared out over the replicas of a rank.

Each parameter is stepped with by one replica, the largest given first to whoever has least; then
all get what each has made of its own::

    mean of the gradients  [ embed ][ layer 0 ][ layer 1 ][ head ]   on every replica
    step of replica 0      [ embed ]           [ layer 1 ]           and what it keeps
    step of replica 1               [ layer 0 ]           [ head ]   and what it keeps
    weights                [ embed ][ layer 0 ][ layer 1 ][ head ]   on every replica
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from lightning_pipeoffload.runtime.buckets import Bundle, in_buckets, share_out
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.replicas import Replicas


class StepShares:
    """Which parameters each replica steps with.

    Args:
        group: This process's groups; its counterparts are in other replicas.
    """

    def __init__(self, group: PipelineGroup) -> None:
        self._group = group
        self._owners: dict[Tensor, int] = {}
        self._loads = [0] * group.num_replicas
        self._stepping: dict[Tensor, None] = {}

    @property
    def num_replicas(self) -> int:
        """Over how many replicas the step is shared out."""
        return len(self._loads)

    def take_on(self, parameters: Iterable[Tensor]) -> None:
        """Decide who steps with parameters that are new; all replicas have them in one order."""
        new = [p for p in parameters if p not in self._owners]
        for trains in (True, False):
            members = [p for p in new if p.requires_grad == trains]
            owners = share_out([p.nbytes for p in members], self._loads)
            self._owners.update(zip(members, owners, strict=True))

    def is_own(self, parameter: Tensor) -> bool:
        """Whether this replica steps with a parameter, and keeps its state."""
        return self._owners.get(parameter) == self._group.replica

    def start_step(self) -> None:
        """Forget what a step before was of, which may have ended in an error."""
        self._stepping.clear()

    def own_of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return those of a group's parameters with which this replica steps now."""
        self.take_on(parameters)
        # What neither trains nor has a gradient is not changed, and need not travel.
        stepping = [p for p in parameters if p.requires_grad or p.grad is not None]
        self._stepping.update(dict.fromkeys(stepping))
        return [p for p in stepping if self.is_own(p)]

    def gather(self) -> None:
        """Let all replicas have what each has made of its parameters; all of them call it.

        They are under way then, as :class:`PendingParameters` says.
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

        replicas.pending.add(end, self._stepping)

    def _values_by_bucket(self, replica: int) -> Iterable[list[Tensor]]:
        values = [p.detach() for p in self._stepping if self._owners[p] == replica and p.numel()]
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
