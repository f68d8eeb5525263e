"""Amounts of memory, read and refused."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_pipeoffload.planning.limits import device_limit, parse_bytes
from lightning_pipeoffload.runtime.payload import TensorSpec
from lightning_pipeoffload.runtime.transport import BufferRing, Link
from lightning_pipeoffload.schedule import Action
from tests.runtime.test_links import LateGroup


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1024, 1024),
        ("1024", 1024),
        ("40GiB", 40 << 30),
        ("1.5 MiB", 3 << 19),
        ("2GB", 2_000_000_000),
        ("7 B", 7),
    ],
)
def test_an_amount_is_read(value, expected):
    assert parse_bytes(value) == expected


@pytest.mark.parametrize("value", [0, -1, "40 gigs", "GiB", "", "1..5GiB", "0GiB", True])
def test_what_is_no_amount_is_refused(value):
    with pytest.raises(ValueError, match="is no amount of memory; use bytes"):
        parse_bytes(value)


def test_a_device_has_left_what_others_than_activations_do_not_take(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (600, 1024))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 400)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 500)
    assert device_limit(torch.device("cuda"), activation_bytes=300) == 900 - 200
    assert device_limit(torch.device("cpu"), activation_bytes=300) is None


class Allocator(TorchDispatchMode):
    """Knows what tensors that are made hold of a device, as an accelerator's allocator does."""

    def __init__(self):
        super().__init__()
        self.held = self.most_held = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            size = result.untyped_storage().nbytes()
            self.held += size
            self.most_held = max(self.most_held, self.held)
            weakref.finalize(result.untyped_storage(), self.free, size)
        return result

    def free(self, size):
        self.held -= size


def test_buffers_of_messages_take_what_activations_cannot_have(monkeypatch):
    tensor, ring = torch.ones(128), BufferRing(torch.device("cpu"))
    link = Link(LateGroup(), 0, 1, torch.device("cpu"), True, ring)
    with Allocator() as allocator:
        for _ in range(3):
            receives = [link.receive([TensorSpec.of(tensor)], 0) for _ in range(2)]
            sends = [link.send([tensor], 0) for _ in range(2)]
            for message in (*receives, *sends):
                message.wait(Action.parse("0SEND_F0"))
    assert allocator.held == ring.num_bytes == 4 * tensor.nbytes
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (10_000, 1 << 20))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(
        torch.accelerator, "max_memory_allocated", lambda device: allocator.most_held
    )
    arrived = tensor.nbytes  # one at a time, which a stage keeps: an activation
    assert device_limit(torch.device("cuda"), arrived) == 9_000 - ring.num_bytes
