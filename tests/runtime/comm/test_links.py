"""Edges on which a receive is garbage until waited for, and a send is read as late as may be."""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_pipeoffload.runtime import TensorSpec
from lightning_pipeoffload.runtime.comm import BufferRing, Link, as_bytes
from lightning_pipeoffload.runtime.comm.transport import nccl_options
from lightning_pipeoffload.schedule import Action
from tests.runtime.comm.test_transport import make_message

CPU = torch.device("cpu")
SEND, RECEIVE = Action.parse("0SEND_F0"), Action.parse("1RECV_F0")


class LateGroup:
    """Both ends of an edge: what is sent is read when somebody waits, as late as that may be."""

    def __init__(self):
        self._sent = deque()

    def send(self, tensors, place, tag):
        read = []

        def wait():
            if not read:
                read.append(tensors[0].clone())

        self._sent.append((wait, read))
        return SimpleNamespace(wait=wait)

    def recv(self, tensors, place, tag):
        tensors[0].fill_(0x5A)

        def wait():
            send, read = self._sent.popleft()
            send()
            tensors[0].copy_(read[0])

        return SimpleNamespace(wait=wait)


def link_of(kind, group):
    ring = BufferRing(CPU) if kind == "ring" else None
    sender = ThreadPoolExecutor(1) if kind == "staged" else None
    return Link(group, 0, 1, CPU, kind in ("bytes", "ring"), ring, sender)


KINDS = ["plain", "bytes", "ring", "staged"]
DTYPES = [
    torch.int16, torch.uint16, torch.uint64, torch.complex64, torch.float8_e4m3fn, torch.bool,
]  # fmt: skip
TENSORS = [
    *make_message(),
    *(torch.arange(6).to(dtype) for dtype in DTYPES),
    torch.randn(3, dtype=torch.complex64).conj(),
    torch.ones(3)[::2][:1],
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: str(tensor.dtype))
def test_any_tensor_goes_over(kind, tensor):
    link = link_of(kind, LateGroup())
    receive = link.receive([TensorSpec.of(tensor)], 0)
    sent = link.send([tensor], 0)
    if kind == "staged":
        link.sender.submit(int).result()  # by now it is on its way
    (found,) = receive.wait(RECEIVE)
    sent.wait(SEND)
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    assert TensorSpec.of(found).stride == TensorSpec.of(tensor).stride
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    assert torch.equal(as_bytes(found.contiguous()), as_bytes(plain))


@pytest.mark.parametrize("kind", ["ring", "staged"])
def test_what_was_sent_may_be_written_right_away(kind):
    link, tensor = link_of(kind, LateGroup()), torch.arange(4.0)
    sent = link.send([tensor], 0)
    receive = link.receive([TensorSpec.of(tensor)], 0)
    tensor.zero_()
    sent.wait(SEND)
    assert torch.equal(receive.wait(RECEIVE)[0], torch.arange(4.0))


def test_buffers_are_used_one_message_after_the_other():
    group, ring = LateGroup(), BufferRing(CPU)
    link, tensor = Link(group, 0, 1, CPU, True, ring), torch.ones(4)
    kept = []
    for step in range(3):
        receives = [link.receive([TensorSpec.of(tensor)], 0) for _ in range(2)]
        sends = [link.send([tensor * (2 * step + place)], 0) for place in range(2)]
        kept += [receive.wait(RECEIVE)[0] for receive in receives]
        for sent in sends:
            sent.wait(SEND)
        assert ring.num_bytes == 4 * 512
    assert [float(tensor[0]) for tensor in kept] == [0, 1, 2, 3, 4, 5]


def test_buffers_of_lengths_that_vary_are_bounded():
    ring, most = BufferRing(CPU), 0
    for length in range(10_000, 110_000, 1_000):
        buffers = [ring.acquire(length) for _ in range(3)]
        most = max(most, sum(buffer.numel() for buffer in buffers))
        assert all(length <= buffer.numel() <= length * 9 / 8 + 512 for buffer in buffers)
        for buffer in buffers:
            ring.release(buffer)
        assert ring.num_bytes <= 2 * most


def use(ring, sizes):
    """Use buffers of these sizes at once in a step; return their sizes."""
    buffers = [ring.acquire(size) for size in sizes]
    for buffer in buffers:
        ring.release(buffer)
    ring.end_step()
    return [buffer.numel() for buffer in buffers]


def test_a_free_buffer_serves_a_message_of_half_its_size_or_more():
    ring = BufferRing(CPU)
    use(ring, [4096, 8192])
    assert use(ring, [4096, 4096]) == [4096, 8192]
    assert use(ring, [8192, 2048, 1024]) == [8192, 4096, 1024]


def test_what_the_last_steps_have_not_used_is_freed():
    ring = BufferRing(CPU)
    use(ring, [4096] * 5)
    found = [use(ring, [4096] * 2) and ring.num_bytes for _ in range(4)]
    assert found == [5 * 4096, 5 * 4096, 5 * 4096, 2 * 4096]


class DoneWork:
    """A message that the device has sent, for which nothing may wait."""

    def is_completed(self):
        return True


def test_what_has_been_sent_is_freed_without_a_wait():
    link = Link(SimpleNamespace(send=lambda *_: DoneWork()), 0, 1, CPU, True, BufferRing(CPU))
    message = link.send([torch.ones(4)], 0)
    assert message.has_ended()
    message.return_buffers()
    assert link.send([torch.ones(4)], 0).memory[0] is message.memory[0]


def test_a_buffer_whose_message_is_on_its_way_is_not_used():
    group, ring = LateGroup(), BufferRing(CPU)
    link = Link(group, 0, 1, CPU, True, ring)
    sends = [link.send([torch.full((4,), value)], 0) for value in (1.0, 2.0)]
    receives = [link.receive([TensorSpec(torch.Size([4]), torch.float32, False)], 0) for _ in sends]
    for sent in sends:
        sent.wait(SEND)
    assert [float(receive.wait(RECEIVE)[0][0]) for receive in receives] == [1.0, 2.0]


class Options:
    """What torch's NCCL takes, where it is not built in."""

    def __init__(self, is_high_priority_stream=False):
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(min_ctas=None, max_ctas=None)


def test_nccl_gets_one_channel_and_a_high_priority(monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    found = nccl_options(timedelta(minutes=1))
    assert found.is_high_priority_stream
    assert (found.config.min_ctas, found.config.max_ctas) == (1, 1)
    assert found._timeout == timedelta(minutes=1)
    assert not hasattr(nccl_options(None), "_timeout")
