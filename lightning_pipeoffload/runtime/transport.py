"""How tensors travel between the ranks of a pipeline.

A message is what one SEND action sends: a list of tensors whose shapes both sides know from the
probe. A send never waits for the receiver to come round; only the consumer waits::

    sender    F0 SEND_F0 F1 SEND_F1 F2 ...              goes on at once
    receiver  post RECV_F0 ... F0, post RECV_F1 ... F1  waits in F0, where the message is used
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeoffload.runtime.mesh import RankMesh
from lightning_pipeoffload.runtime.message_links import (
    DEFAULTS,
    BufferRing,
    Link,
    Message,
    MessageSettings,
)
from lightning_pipeoffload.runtime.payload import TensorSpec
from lightning_pipeoffload.schedule import Action, Kind
from lightning_pipeoffload.schedule.messages import recv_of

# A gloo tag holds the kind, stage, microbatch and place in the list of one tensor.
MOST_MICROBATCHES = 1 << 12
_STAGES, _TENSORS = 1 << 9, 1 << 9

# With fewer examples/benchmarks/hangs.py finds plans that hang.
_FEWEST_QUEUES = 4


class PeerLostError(RuntimeError):
    """Another rank went away: the cause is to be found there."""


@contextmanager
def blaming_peers(what: str) -> Iterator[None]:
    """Turn what gloo and NCCL raise when another rank is gone into :class:`PeerLostError`.

    An accelerator's own errors surface wherever something waits for it, and are this rank's.
    """
    try:
        yield
    except RuntimeError as error:
        _blame_peer(error, what)
        raise


def _blame_peer(error: RuntimeError, what: str) -> None:
    if says_peer_lost(error):
        raise PeerLostError(f"{what}: {str(error).splitlines()[0]}") from error


def says_peer_lost(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone."""
    if isinstance(error, (PeerLostError, dist.DistError)):
        return True
    # What gloo raises has no type of its own.
    return isinstance(error, RuntimeError) and "gloo/" in str(error)


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

    def take_back(self) -> None:
        """Let go of what was sent in this step, all of which has come, and starts anew."""

    def finish_step(self) -> None:
        """Let go of what was sent in the step before."""


class InProcessTransport:
    """Between ranks that live in one process: for tests, for one GPU, for rehearsing a rank."""

    def __init__(self) -> None:
        self._arrived: defaultdict[Action, deque[list[Tensor]]] = defaultdict(deque)

    def post(self, receive: Action, peer: int, specs: list[TensorSpec]) -> None:
        """Do nothing: the tensors themselves are handed over."""

    def has_arrived(self, receive: Action) -> bool:
        """Whether the message was sent."""
        return bool(self._arrived[receive])

    def wait(self, receive: Action) -> list[Tensor]:
        """Return a message that was sent before.

        Raises:
            RuntimeError: The message was not sent; ranks in one process must take turns.
        """
        if not self._arrived[receive]:
            raise RuntimeError(f"{receive} is not there yet; run the rank that sends it first")
        return self._arrived[receive].popleft()

    def send(self, send: Action, peer: int, tensors: list[Tensor]) -> None:
        """Hand the tensors over."""
        self._arrived[recv_of(send)].append(tensors)

    def release(self, send: Action) -> None:
        """Do nothing: the tensors are the receiver's."""

    def take_back(self) -> None:
        """Do nothing: nothing is kept here of what was sent."""

    def finish_step(self) -> None:
        """Do nothing: nothing is kept here of what was sent."""


class ProcessGroupTransport:
    """Between processes, over ``torch.distributed``.

    gloo tells messages apart by tags. NCCL knows no tags and runs what two ranks exchange in one
    communicator in one order, so each directed edge has a communicator of its own, and its messages
    arrive in the order of the plan.

    Args:
        mesh: The processes, and which of them are this one's pipeline.
        edges: Directed pairs of pipeline ranks that exchange messages.
        device: The device that the tensors are on.
        settings: The settings of messages over NCCL.
    """

    def __init__(
        self,
        mesh: RankMesh,
        edges: set[tuple[int, int]],
        device: torch.device,
        settings: MessageSettings = DEFAULTS,
    ) -> None:
        self._mesh = mesh
        self._edges = edges
        self._device = device
        self._settings = settings
        self._backend = _backend_for(device)
        if self._backend == "nccl":
            check_queues()
        keeps_buffers = self._backend != "gloo" and settings.keeps_buffers
        self._ring = BufferRing(device) if keeps_buffers else None
        self.connect()

    def connect(self) -> None:
        """Make the groups, on all ranks; again: forget what was on its way."""
        global_ranks, rank, edges = self._mesh.global_ranks, self._mesh.rank, self._edges
        groups = self._make_groups()
        self._to: dict[int, Link] = {}
        self._from: dict[int, Link] = {}
        for edge in sorted(edges):  # in the same order on every rank
            source, target = edge
            if source == rank:
                self._to[target] = link = self._link(groups[edge], global_ranks[target])
                self._meet(link, link.group.send)
            if target == rank:
                self._from[source] = link = self._link(groups[edge], global_ranks[source])
                self._meet(link, link.group.recv)
        self._posted: dict[Action, Message] = {}
        self._sent: dict[Action, Message] = {}
        self._sent_before: dict[Action, Message] = {}

    def _link(self, group: Any, global_rank: int) -> Link:
        place = dist.get_group_rank(group, global_rank)
        is_gloo = self._backend == "gloo"
        # Each edge has a thread of its own, so that none waits for another.
        sender = ThreadPoolExecutor(1) if is_gloo and _is_staged(self._device) else None
        return Link(group, place, global_rank, self._device, not is_gloo, self._ring, sender)

    def _make_groups(self) -> dict[tuple[int, int], Any]:
        if self._backend == "gloo":
            return dict.fromkeys(self._edges, self._mesh.make_group(backend="gloo"))
        is_nccl = self._backend == "nccl"
        options = self._settings.options(self._mesh.timeout) if is_nccl else None
        return {
            edge: self._mesh.edge_group(edge, pg_options=options)
            for edge in sorted(self._edges)  # every rank makes them in this order
        }

    def _meet(self, link: Link, exchange: Callable[..., Any]) -> None:
        """Let the two ends of an edge connect.

        NCCL connects where the first message is posted, and both ends wait there for each other: a
        rank that posts what it is to receive before it sends would wait for ever.
        """
        device = torch.device("cpu") if self._backend == "gloo" else self._device
        with blaming_peers(f"global rank {link.global_rank}, lost while connecting"):
            exchange([torch.zeros(1, device=device)], link.place, 0).wait()

    def post(self, receive: Action, peer: int, specs: list[TensorSpec]) -> None:
        """Make room for the tensors and start receiving them."""
        link, tag = self._from[peer], _first_tag(receive, len(specs))
        self._posted[receive] = link.receive(specs, tag)

    def wait(self, receive: Action) -> list[Tensor]:
        """Wait for the tensors; over NCCL the accelerator's stream does, not the host."""
        return _wait(self._posted.pop(receive), receive)

    def send(self, send: Action, peer: int, tensors: list[Tensor]) -> None:
        """Start sending, and keep the tensors, or their copies, until they are gone."""
        link, tag = self._to[peer], _first_tag(recv_of(send), len(tensors))
        self._sent[send] = link.send(tensors, tag)

    def release(self, send: Action) -> None:
        """Wait until it has arrived, where the accelerator's stream or, on CPU, the host does.

        Without a wait a gloo send never counts as completed.
        """
        message = self._sent.pop(send, None)
        if message is not None:
            _wait(message, send)

    def take_back(self) -> None:
        """Let go of what was sent in this step, which starts anew on all ranks."""
        for send in [*self._sent]:
            self.release(send)

    def finish_step(self) -> None:
        """Let go of what was sent in the step before; wait for it if a peer is that far behind."""
        for send, message in self._sent_before.items():
            _wait(message, send)
        self._sent, self._sent_before = {}, self._sent


def _wait(message: Message, action: Action) -> list[Tensor]:
    # Not blaming_peers(): a message takes no words as long as nothing is wrong.
    try:
        return message.wait()
    except RuntimeError as error:
        _blame_peer(error, f"global rank {message.link.global_rank}, lost in {action}")
        raise


def check_queues() -> None:
    """Check that the device has enough hardware queues.

    Raises:
        ValueError: Streams share so few that messages block what the ranks need to receive them.
    """
    given = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    if int(given) < _FEWEST_QUEUES:
        raise ValueError(
            f"CUDA_DEVICE_MAX_CONNECTIONS ({given}) must be at least {_FEWEST_QUEUES}, or messages "
            f"that share a hardware queue may wait for each other for ever; unset it, or use 32"
        )


def _is_staged(device: torch.device) -> bool:
    """Whether gloo, which reads and writes the host's memory, cannot have a device's own."""
    return device.type != "cpu"


def _backend_for(device: torch.device) -> str:
    """Return what the default group uses for the device, of "cpu:gloo,cuda:nccl" say."""
    if device.type == "cpu":
        return "gloo"
    backends = dict(part.split(":") for part in dist.get_backend_config().split(","))
    return backends[device.type]


def _first_tag(receive: Action, num_tensors: int) -> int:
    """Return the tag of a message's first tensor; those of the others follow."""
    _, stage, microbatch = receive
    if stage >= _STAGES or microbatch >= MOST_MICROBATCHES or num_tensors > _TENSORS:
        raise ValueError(
            f"{receive} of {num_tensors} tensors: gloo's tags tell at most {_STAGES} stages, "
            f"{MOST_MICROBATCHES} microbatches and {_TENSORS} tensors apart"
        )
    backward = receive.kind is Kind.RECV_B
    return ((backward * _STAGES + stage) * MOST_MICROBATCHES + microbatch) * _TENSORS
