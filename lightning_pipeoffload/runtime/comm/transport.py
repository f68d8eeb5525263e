"""Messages between the ranks of a pipeline.

A message is sent by one SEND action: a list of tensors whose shapes both sides know from the
trace. The consumer waits; a sender only where its edge is as full as a training step makes it::

    sender    F0 SEND_F0 F1 SEND_F1 F2 ...              goes on at once
    receiver  post RECV_F0 ... F0, post RECV_F1 ... F1  waits in F0, where the message is used

Over NCCL tensors go as bytes, since it knows fewer dtypes than torch, and through buffers that are
used again: its group tells the allocator that another stream uses a message's memory, and the
allocator frees such memory only when all work on that stream is done, so each message of a step
would take fresh memory. gloo reads and writes the host's memory: on an accelerator its messages go
through pinned memory.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeoffload.runtime import TensorSpec, dense_stride, late_values
from lightning_pipeoffload.runtime.comm.mesh import RankMesh
from lightning_pipeoffload.runtime.device import profiler_range, unprofiled
from lightning_pipeoffload.schedule import SENDS, Action, Kind, recv_of

# A gloo tag holds the kind, stage, microbatch and index in the list of one tensor.
MOST_MICROBATCHES = 1 << 12
_STAGES, _TENSORS = 1 << 9, 1 << 9

# With fewer examples/benchmarks/hangs.py finds plans that hang.
_FEWEST_QUEUES = 7
# Channels of NCCL for one edge: an open receive or send takes a multiprocessor for each, and
# products take much longer meanwhile. At 20 GB/s, which one should carry over NVLink (untried), the
# output of two layers of width 4096 is sent in a fifth of the time that it takes to compute them.
_MOST_CHANNELS = 1
SMALLEST_BUFFER = 512
# Steps for which a ring keeps buffers that none of them uses.
_STEPS_KEPT = 4


class PeerLostError(RuntimeError):
    """Another rank is gone; the cause is in its own messages."""


@contextmanager
def reporting_lost_peers(what: str) -> Iterator[None]:
    """Turn the errors of gloo and NCCL for a rank that is gone into :class:`PeerLostError`.

    An accelerator's own errors surface wherever something waits for it, and are this rank's.
    """
    try:
        yield
    except RuntimeError as error:
        _raise_if_peer_lost(error, what)
        raise


def wait_for(work: Any, what: str, result: Any = None) -> Any:
    """Wait for a collective and return ``result``; as :func:`reporting_lost_peers` in errors."""
    with reporting_lost_peers(what):
        work.wait()
    return result


def _raise_if_peer_lost(error: RuntimeError, what: str) -> None:
    if is_lost_peer_error(error):
        raise PeerLostError(f"{what}: {str(error).splitlines()[0]}") from error


def is_lost_peer_error(error: BaseException) -> bool:
    """Return whether an error only reports a lost rank."""
    if isinstance(error, (PeerLostError, dist.DistError)):
        return True
    # gloo's errors have no type of their own.
    return isinstance(error, RuntimeError) and "gloo/" in str(error)


class CommunicationThread(ThreadPoolExecutor):
    """A thread whose work other ranks wait for, so that an error in it ends the run at once.

    The main thread would raise it where it reads the result. Until then it may wait for a message
    of these ranks, which never comes.

    Args:
        doing: What the thread does, as in "while sending a message".
        fail: Ends the run; None: errors come with the results alone.
    """

    def __init__(self, doing: str, fail: Callable[[BaseException, str], None] | None) -> None:
        super().__init__(1)
        self._doing, self._fail = doing, fail

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(self._end_run_on_error)
        return future

    def _end_run_on_error(self, future: Future[Any]) -> None:
        error = None if future.cancelled() else future.exception()
        # A lost peer has an end of its own, and the main thread loses it too.
        if error is not None and self._fail is not None and not is_lost_peer_error(error):
            self._fail(error, self._doing)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor without gaps as bytes of the same memory, in the order of the memory."""
    # Not view(-1): a dimension of one element may have any stride.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def broadcast_bytes(tensor: Tensor, source: int, group: Any, device: torch.device | str) -> Tensor:
    """Return a contiguous copy of the tensor of global rank ``source``, on each rank of a group.

    As bytes: neither gloo nor NCCL knows every dtype.

    Args:
        tensor: On the other ranks one of the same shape and dtype.
        source: The global rank.
        group: The process group.
        device: The device of the copy.
    """
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if dist.get_rank() == source:
        copied.copy_(tensor.detach())
    dist.broadcast(as_bytes(copied), source, group=group)
    return copied


class Transport:
    """Moves messages; ``peer`` is always a pipeline rank.

    An action names the message at both ends: SEND_F of stage s is received as RECV_F of s + 1,
    SEND_B of s as RECV_B of s - 1.
    """

    def post(self, receive: Action, peer: int, specs: list[TensorSpec]) -> None:
        """Start to receive a message that ``peer`` will send."""

    def wait(self, receive: Action) -> list[Tensor]:
        """Return the tensors of a posted message."""
        raise NotImplementedError

    def send(self, send: Action, peer: int, tensors: list[Tensor]) -> None:
        """Start to send; never waits."""
        raise NotImplementedError

    def drain_sends(self, peer: int, left: int) -> None:
        """Wait for all messages to a peer but the ``left`` newest, and free their tensors."""

    def free_unused_buffers(self) -> None:
        """Free buffers that the last few steps have not used."""

    @property
    def open_receives(self) -> Sequence[Action]:
        """Receives that were posted, and whose message has not been waited for to its end."""
        return ()

    @property
    def buffer_bytes(self) -> int:
        """The bytes of buffers that messages go through."""
        return 0

    @property
    def has_kernels(self) -> bool:
        """Whether messages are kernels on the device, so that a wait for it waits for them too."""
        return False


class ProfiledTransport(Transport):
    """Another transport, whose waits a profiler shows: ``wait 1RECV_F0``, ``wait SEND to rank 2``.

    A send is waited for where its edge is full, and where what it holds is freed.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._unrecorded = nullcontext if transport.has_kernels else unprofiled

    def post(self, receive: Action, peer: int, specs: list[TensorSpec]) -> None:
        with self._unrecorded():
            self._transport.post(receive, peer, specs)

    def wait(self, receive: Action) -> list[Tensor]:
        with profiler_range(f"wait {receive}"):
            return self._transport.wait(receive)

    def send(self, send: Action, peer: int, tensors: list[Tensor]) -> None:
        with self._unrecorded():
            self._transport.send(send, peer, tensors)

    def drain_sends(self, peer: int, left: int) -> None:
        with profiler_range(f"wait SEND to rank {peer}"):
            self._transport.drain_sends(peer, left)


class BufferRing:
    """Buffers that messages use one after the other.

    The compute lane waits for a message before its buffer is free again::

        send     tensor -- copy --> buffer -- NCCL --> peer;  wait;  back into the ring
        receive  peer -- NCCL --> buffer;  wait;  -- copy --> tensor;  back into the ring

    Sizes are rounded up by an eighth at most, and a free buffer of up to twice the size serves too,
    since lengths may vary. Buffers that the last steps have not used are freed, and those that were
    unused for longest where the ring would have twice the bytes that were in use at once in these
    steps. A plan's limit counts them among the bytes that the device held apart from activations
    when it was measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = 0
        self._in_use = 0
        self._most_in_use = deque([0], maxlen=_STEPS_KEPT)
        self._device = device
        self._step = 0
        self._free: deque[tuple[Tensor, int]] = deque()  # with the step of its last use, in order

    def acquire(self, num_bytes: int) -> Tensor:
        size = _size_class(num_bytes)
        sizes = ((buffer.numel(), -n) for n, (buffer, _) in enumerate(self._free))
        # Of the smallest the one that was used last, so that those that no step needs stay unused.
        _, index = min((fit for fit in sizes if size <= fit[0] <= 2 * size), default=(0, None))
        if index is None:
            buffer = self._allocate(size)
        else:
            buffer, _ = self._free[-index]
            del self._free[-index]
        self._in_use += buffer.numel()
        self._most_in_use[-1] = max(self._most_in_use[-1], self._in_use)
        return buffer

    def _allocate(self, size: int) -> Tensor:
        most = max(*self._most_in_use, self._in_use + size)
        while self._free and self.num_bytes + size > 2 * most:
            self._drop()
        self.num_bytes += size
        with torch.inference_mode(False):  # a validation may come first
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _drop(self) -> None:
        self.num_bytes -= self._free.popleft()[0].numel()

    def release(self, buffer: Tensor) -> None:
        """Free a buffer, once the compute lane has waited for its last message."""
        self._in_use -= buffer.numel()
        self._free.append((buffer, self._step))

    def end_step(self) -> None:
        """Drop the buffers that the last steps have not used."""
        self._step += 1
        self._most_in_use.append(self._in_use)
        while self._free and self._free[0][1] < self._step - _STEPS_KEPT:
            self._drop()


def _size_class(num_bytes: int) -> int:
    step = max(SMALLEST_BUFFER, (1 << num_bytes.bit_length()) >> 4)
    return max(1, -(-num_bytes // step)) * step


@dataclass(frozen=True)
class Link:
    """One end of a directed edge, over a group of torch.distributed.

    Tensors go as they are, through a ring's buffers, or through the host's memory. A send never
    waits: where tensors go through the host, a thread waits for the copy.

    Attributes:
        peer: The peer's rank in the group.
        global_rank: The global rank of the peer.
        device: The device of the tensors.
        sends_bytes: Whether tensors go as bytes, since the group checks dtypes; gloo does not.
        ring: The buffers of this rank that messages go through.
        sender: The thread that sends copies on the host.
    """

    group: Any
    peer: int
    global_rank: int
    device: torch.device
    sends_bytes: bool = False
    ring: BufferRing | None = None
    sender: ThreadPoolExecutor | None = None

    # The group's own methods: dist.isend and irecv cost 90 us more a message on gloo.

    def send(self, tensors: Sequence[Tensor], tag: int) -> Message:
        """Start to send tensors, with consecutive tags from ``tag`` on."""
        message = Message(self)
        for number, tensor in enumerate(map(_as_dense, tensors), tag):
            if self.sender is not None:
                # The thread that reads the copy also keeps it until the message has gone.
                memory: Any = late_values.start_host_copy(as_bytes(tensor))
                work = self.sender.submit(self._send_copy, memory, number)
            else:
                memory, data = tensor, tensor.as_strided((tensor.numel(),), (1,))
                data = data.view(torch.uint8) if self.sends_bytes else data
                if self.ring is not None:
                    memory = self.ring.acquire(tensor.nbytes)
                    data = memory[: tensor.nbytes].copy_(as_bytes(tensor))
                work = self.group.send([data], self.peer, number)
            message.works.append(work)
            message.memory.append(memory)
        return message

    def receive(self, specs: Sequence[TensorSpec], tag: int) -> Message:
        """Start to receive tensors, with consecutive tags from ``tag`` on."""
        message = Message(self, specs)
        for number, spec in enumerate(specs, tag):
            if self.ring is not None:
                memory = self.ring.acquire(spec.num_bytes)
                data = memory[: spec.num_bytes]
            elif self.sender is not None:
                pinned = self.device.type != "cpu"
                data = memory = torch.empty(spec.num_bytes, dtype=torch.uint8, pin_memory=pinned)
            else:
                memory = spec.empty(self.device)
                data = memory.as_strided((memory.numel(),), (1,))
                data = data.view(torch.uint8) if self.sends_bytes else data
            message.works.append(self.group.recv([data], self.peer, number))
            message.memory.append(memory)
        return message

    def _send_copy(self, read: Callable[[], Tensor], tag: int) -> Any:
        return self.group.send([read()], self.peer, tag)


class Message:
    """Tensors on their way over a link; the memory that torch reads or writes is kept meanwhile.

    ``specs`` describes the tensors of a message that is received, and is None for one that is sent.
    """

    __slots__ = ("_specs", "link", "memory", "works")

    def __init__(self, link: Link, specs: Sequence[TensorSpec] | None = None) -> None:
        self.link = link
        self.works: list[Any] = []
        self.memory: list[Any] = []
        self._specs = specs

    def wait(self, action: Action) -> list[Tensor]:
        """Wait until all tensors are sent, or received; return the received ones.

        Over NCCL the accelerator's stream waits, not the host. ``action`` is for errors.
        """
        link, specs = self.link, self._specs
        try:
            for work in self.works:
                (work.result() if specs is None and link.sender is not None else work).wait()
        except RuntimeError as error:
            # Not reporting_lost_peers(): a message formats no text as long as nothing is wrong.
            _raise_if_peer_lost(error, f"global rank {link.global_rank}, lost in {action}")
            raise
        if link.ring is None and link.sender is None:
            return self.memory
        received = [*map(self._tensor_in, self.memory, specs or ())]
        self.return_buffers()
        return received

    def has_ended(self) -> bool:
        """Whether the device has sent it completely, so that it can be freed without a wait."""
        return all(work.is_completed() for work in self.works)

    def return_buffers(self) -> None:
        """Return the buffers of an ended message to the ring, without a wait."""
        if (ring := self.link.ring) is not None:
            for memory in self.memory:
                ring.release(memory)

    def _tensor_in(self, memory: Tensor, spec: TensorSpec) -> Tensor:
        link = self.link
        tensor = spec.empty(link.device)
        as_bytes(tensor).copy_(memory[: spec.num_bytes], non_blocking=link.sender is not None)
        return tensor


def _as_dense(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory holds its elements and nothing else."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    tensor = tensor.detach()
    if tensor.is_contiguous() or tensor.stride() == dense_stride(tensor):
        return tensor
    return tensor.clone()  # without gaps, in the order of the dimensions in memory


class ProcessGroupTransport(Transport):
    """Between processes, over ``torch.distributed``.

    gloo tells messages apart by tags. NCCL knows no tags and runs the messages of two ranks in one
    communicator in one order, so each directed edge has a communicator of its own, and its messages
    arrive in the order of the plan.

    Args:
        edges: Directed pairs of pipeline ranks that exchange messages.
        device: The device of the tensors.
    """

    def __init__(self, mesh: RankMesh, edges: set[tuple[int, int]], device: torch.device) -> None:
        self._mesh = mesh
        self._edges = edges
        self._device = device
        self._backend = _backend_for(device)
        if self._backend == "nccl" and edges:
            check_cuda_variables()
        self.connect()

    def connect(self) -> None:
        """Make the groups on all ranks; a second call discards pending messages."""
        rank, groups = self._mesh.rank, self._make_groups()
        self._ring = self._buffers()
        self._to: dict[int, Link] = {}
        self._from: dict[int, Link] = {}
        for edge in sorted(self._edges):  # in the same order on every rank
            source, target = edge
            if source == rank:
                self._to[target] = self._open_link(groups[edge], target, "send")
            if target == rank:
                self._from[source] = self._open_link(groups[edge], source, "recv")
        self._posted: dict[Action, Message] = {}
        self._sent: dict[int, deque[tuple[Action, Message]]] = {peer: deque() for peer in self._to}

    def _open_link(self, group: Any, rank: int, exchange: str) -> Link:
        """Make a link and exchange a first message over it.

        NCCL connects where the first message is posted, and both ends wait there for each other: a
        rank that posts a receive before it sends would wait for ever.
        """
        link = self._link(group, self._mesh.global_ranks[rank])
        device = torch.device("cpu") if self._backend == "gloo" else self._device
        with reporting_lost_peers(f"global rank {link.global_rank}, lost while connecting"):
            getattr(group, exchange)([torch.zeros(1, device=device)], link.peer, 0).wait()
        return link

    def _link(self, group: Any, global_rank: int) -> Link:
        peer = dist.get_group_rank(group, global_rank)
        is_gloo = self._backend == "gloo"
        # Each edge has a thread of its own, so that none waits for another.
        sender = None
        if is_gloo and _is_staged(self._device):
            sender = CommunicationThread(
                f"while sending to global rank {global_rank}", self._mesh.fail
            )
        return Link(group, peer, global_rank, self._device, not is_gloo, self._ring, sender)

    def _buffers(self) -> BufferRing | None:
        return None if self._backend == "gloo" else BufferRing(self._device)

    def _make_groups(self) -> dict[tuple[int, int], Any]:
        if self._backend == "gloo":
            return dict.fromkeys(
                self._edges, self._mesh.make_pipeline_group("messages", backend="gloo")
            )
        is_nccl = self._backend == "nccl"
        make_options = partial(nccl_options, self._mesh.timeout) if is_nccl else None
        return {
            edge: self._mesh.make_edge_group(edge, make_options)
            for edge in sorted(self._edges)  # every rank makes them in this order
        }

    def post(self, receive: Action, peer: int, specs: list[TensorSpec]) -> None:
        link, tag = self._from[peer], _first_tag(receive, len(specs))
        self._posted[receive] = link.receive(specs, tag)

    def wait(self, receive: Action) -> list[Tensor]:
        received = self._posted[receive].wait(receive)
        del self._posted[receive]  # only now, so that a rank that waits can tell for what
        return received

    def send(self, send: Action, peer: int, tensors: list[Tensor]) -> None:
        link, tag, sent = self._to[peer], _first_tag(send, len(tensors)), self._sent[peer]
        # Over NCCL only: gloo's messages never end by themselves.
        while sent and self._ring is not None and sent[0][1].has_ended():
            sent.popleft()[1].return_buffers()
        sent.append((send, link.send(tensors, tag)))

    def drain_sends(self, peer: int, left: int) -> None:
        sent = self._sent[peer]
        while len(sent) > left:
            send, message = sent.popleft()
            message.wait(send)

    def free_unused_buffers(self) -> None:
        if self._ring is not None:
            self._ring.end_step()

    @property
    def open_receives(self) -> Sequence[Action]:
        return [*self._posted]

    @property
    def buffer_bytes(self) -> int:
        return 0 if self._ring is None else self._ring.num_bytes

    @property
    def has_kernels(self) -> bool:
        return self._backend == "nccl" and bool(self._edges)


def nccl_options(timeout: timedelta | None) -> Any:
    """Return the options of a NCCL group for one edge: few channels, and a high priority."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        options._timeout = timeout  # private: torch warns where it differs from the group's
    options.config.min_ctas = 1
    options.config.max_ctas = _MOST_CHANNELS
    return options


def check_cuda_variables() -> None:
    """Raise ``ValueError`` for CUDA settings with which a pipeline over NCCL may hang.

    With them a host or a hardware queue waits for a message that is sent only later.
    """
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    if int(connections) < _FEWEST_QUEUES:
        raise ValueError(
            f"CUDA_DEVICE_MAX_CONNECTIONS ({connections}) must be at least {_FEWEST_QUEUES}, or "
            f"messages that share a hardware queue may wait for each other for ever; unset it, or "
            f"use 32"
        )
    blocking = os.environ.get("CUDA_LAUNCH_BLOCKING", "0")
    if blocking not in ("", "0"):
        raise ValueError(
            f"CUDA_LAUNCH_BLOCKING ({blocking}) lets hosts wait for each kernel, a receive too, "
            f"whose message may be sent only later; unset it, or use one device"
        )


def _is_staged(device: torch.device) -> bool:
    """Whether gloo, which reads and writes the host's memory, cannot use a device's own."""
    return device.type != "cpu"


def _backend_for(device: torch.device) -> str:
    """Return the default group's backend for a device, such as "nccl" for cuda."""
    if device.type == "cpu":
        return "gloo"
    backends = dict(part.split(":") for part in dist.get_backend_config().split(","))
    return backends[device.type]


def goes_through_host(device: torch.device) -> bool:
    """Whether a device's messages go over gloo, which cannot use the device's memory."""
    return _is_staged(device) and _backend_for(device) == "gloo"


@cache
def _first_tag(action: Action, num_tensors: int) -> int:
    """Return the tag of the first tensor that a SEND or RECV moves; those of the others follow."""
    receive = recv_of(action) if action.kind in SENDS else action
    _, stage, microbatch = receive
    if stage >= _STAGES or microbatch >= MOST_MICROBATCHES or num_tensors > _TENSORS:
        raise ValueError(
            f"{receive} of {num_tensors} tensors: gloo's tags tell at most {_STAGES} stages, "
            f"{MOST_MICROBATCHES} microbatches and {_TENSORS} tensors apart"
        )
    backward = receive.kind is Kind.RECV_B
    return ((backward * _STAGES + stage) * MOST_MICROBATCHES + microbatch) * _TENSORS
