"""How tensors travel between the ranks of a pipeline.

A message is what one SEND action sends: a list of tensors whose shapes both sides know from the
probe. The receives of a step are posted before its first one is needed, so a send never waits for
the receiver to come round; only the consumer waits.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeoffload.runtime.payload import TensorSpec
from lightning_pipeoffload.schedule import Action, Kind
from lightning_pipeoffload.schedule.messages import recv_of

# A gloo tag holds the kind, stage, microbatch and place in the list of one tensor.
_STAGES, _MICROBATCHES, _TENSORS = 1 << 9, 1 << 12, 1 << 9


class PeerLostError(RuntimeError):
    """Another rank went away: the cause is to be found there."""


@contextmanager
def blaming_peers(what: str) -> Iterator[None]:
    """Turn what gloo and NCCL raise when another rank is gone into :class:`PeerLostError`."""
    try:
        yield
    except RuntimeError as error:
        # torch's signal handler raises this one wherever the main thread is.
        if str(error).startswith("DataLoader worker"):
            raise
        reason = str(error).splitlines()[0]
        raise PeerLostError(f"{what}: {reason}") from error


class Transport(Protocol):
    """Moves messages; ``peer`` is always a pipeline rank.

    An action names the message at both ends: SEND_F of stage s is received as RECV_F of s + 1,
    SEND_B of s as RECV_B of s - 1.
    """

    def post(self, receive: Action, peer: int, specs: list[TensorSpec]) -> None:
        """Make room for a message that ``peer`` will send."""

    def wait(self, receive: Action) -> list[Tensor]:
        """Return the tensors of a posted message."""

    def send(self, send: Action, peer: int, tensors: list[Tensor]) -> None:
        """Start sending; never waits."""

    def release(self, send: Action) -> None:
        """Let go of what was sent, once it has arrived; it may be long gone."""

    def finish_step(self) -> None:
        """Let go of what was sent in the step before."""


class InProcessTransport:
    """Between ranks that live in one process: for tests, for one GPU, for rehearsing a rank."""

    def __init__(self) -> None:
        self._arrived: defaultdict[Action, deque[list[Tensor]]] = defaultdict(deque)

    def post(self, receive: Action, peer: int, specs: list[TensorSpec]) -> None:
        """Nothing to do: the tensors themselves are handed over."""

    def has_arrived(self, receive: Action) -> bool:
        """Whether the message was sent."""
        return bool(self._arrived[receive])

    def wait(self, receive: Action) -> list[Tensor]:
        """Return a message that was sent before.

        Raises:
            RuntimeError: it was not; ranks in one process must take turns.
        """
        if not self._arrived[receive]:
            raise RuntimeError(f"{receive} is not there yet; run the rank that sends it first")
        return self._arrived[receive].popleft()

    def send(self, send: Action, peer: int, tensors: list[Tensor]) -> None:
        """Hand the tensors over."""
        self._arrived[recv_of(send)].append(tensors)

    def release(self, send: Action) -> None:
        """The tensors are the receiver's."""

    def finish_step(self) -> None:
        """Nothing to let go of."""


class ProcessGroupTransport:
    """Between processes, over ``torch.distributed``.

    gloo tells messages apart by tags. NCCL knows no tags and runs what two ranks exchange in one
    communicator in one order, so each directed edge has a communicator of its own, and its messages
    arrive in the order of the plan.

    Args:
        global_ranks: of the pipeline's ranks.
        rank: of this process in the pipeline.
        edges: directed pairs of pipeline ranks that exchange messages.
        device: where the tensors are.
    """

    def __init__(
        self,
        global_ranks: list[int],
        rank: int,
        edges: set[tuple[int, int]],
        device: torch.device,
    ) -> None:
        self._global_ranks = global_ranks
        self._rank = rank
        self._device = device
        self._groups = self._make_groups(edges)
        self._posted: dict[Action, _Message] = {}
        self._sent: dict[Action, _Message] = {}
        self._sent_before: dict[Action, _Message] = {}

    def _make_groups(self, edges: set[tuple[int, int]]) -> dict[tuple[int, int], Any]:
        if self._device.type == "cpu":
            group = dist.new_group(self._global_ranks, backend="gloo")
            return dict.fromkeys(edges, group)
        return {
            edge: dist.new_group([self._global_ranks[edge[0]], self._global_ranks[edge[1]]])
            for edge in sorted(edges)  # every rank makes them in this order
        }

    def _peer_in_group(self, edge: tuple[int, int], peer: int) -> int:
        return dist.get_group_rank(self._groups[edge], self._global_ranks[peer])

    def post(self, receive: Action, peer: int, specs: list[TensorSpec]) -> None:
        """Allocate the tensors and start receiving into them."""
        edge = (peer, self._rank)
        tensors = [torch.empty(s.shape, dtype=s.dtype, device=self._device) for s in specs]
        source, group = self._peer_in_group(edge, peer), self._groups[edge]
        # The group's own method: dist.irecv costs 90 us more a message on gloo.
        works = [
            group.recv([tensor], source, _tag(receive, place))
            for place, tensor in enumerate(tensors)
        ]
        self._posted[receive] = _Message(tensors, works, self._global_ranks[peer])

    def wait(self, receive: Action) -> list[Tensor]:
        """Wait for the tensors; on an accelerator its stream does, not the host."""
        message = self._posted.pop(receive)
        message.wait(receive)
        return message.tensors

    def send(self, send: Action, peer: int, tensors: list[Tensor]) -> None:
        """Start sending, and keep the tensors until they are gone."""
        edge = (self._rank, peer)
        tensors = [tensor.contiguous() for tensor in tensors]
        target, group = self._peer_in_group(edge, peer), self._groups[edge]
        receive = recv_of(send)
        works = [
            group.send([tensor], target, _tag(receive, place))
            for place, tensor in enumerate(tensors)
        ]
        self._sent[send] = _Message(tensors, works, self._global_ranks[peer])

    def release(self, send: Action) -> None:
        """Wait until it has arrived, where the accelerator's stream or, on CPU, the host does.

        Without a wait a gloo send never counts as completed.
        """
        self._let_go(self._sent, send)

    def finish_step(self) -> None:
        """Let go of what was sent in the step before; wait for it if a peer is that far behind."""
        for send in list(self._sent_before):
            self._let_go(self._sent_before, send)
        self._sent, self._sent_before = {}, self._sent

    def _let_go(self, sent: dict[Action, _Message], send: Action) -> None:
        if send in sent:
            sent.pop(send).wait(send)


class _Message(NamedTuple):
    """Tensors on their way to or from a global rank."""

    tensors: list[Tensor]
    works: list[Any]
    peer: int

    def wait(self, action: Action) -> None:
        with blaming_peers(f"global rank {self.peer}, lost in {action}"):
            for work in self.works:
                work.wait()


def _tag(receive: Action, place: int) -> int:
    counted = {"stages": receive.stage, "microbatches": receive.microbatch, "tensors": place}
    for (name, index), most in zip(
        counted.items(), (_STAGES, _MICROBATCHES, _TENSORS), strict=True
    ):
        if index >= most:
            raise ValueError(f"{receive}: gloo's tags tell at most {most} {name} apart")
    backward = receive.kind is Kind.RECV_B
    number = (backward * _STAGES + receive.stage) * _MICROBATCHES + receive.microbatch
    return number * _TENSORS + place
