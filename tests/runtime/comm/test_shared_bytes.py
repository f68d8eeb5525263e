"""How memory of an accelerator is shared, as far as it can be seen without one."""

from types import SimpleNamespace

import pytest
import torch

from lightning_pipeoffload.runtime.comm import shared_bytes
from lightning_pipeoffload.runtime.comm.shared_bytes import _share_device_bytes

DEVICE = torch.device("cpu", 2)


def of_three(rank):
    """A group of three ranks that do alike."""
    peers = range(3)

    def gather(obj):
        return list(peers) if obj == rank else [dict.fromkeys(peers, obj[1])] * 3

    return SimpleNamespace(gather=gather)


def offer(rebuild, made):
    def reduce(tensor):
        made.append(tensor)
        return rebuild, ("cuda:0", True)

    return reduce


def share(monkeypatch, rebuild):
    made = []
    monkeypatch.setattr(shared_bytes, "reduce_tensor", offer(rebuild, made))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    return _share_device_bytes(8, DEVICE, 0, of_three(0)), made


def test_each_rank_is_offered_its_own_and_opens_it_on_its_own_device(monkeypatch):
    def rebuild(storage_device, event_sync_required):
        return storage_device, event_sync_required

    (own, *others), made = share(monkeypatch, rebuild)
    assert own.dtype == torch.uint8
    assert own.numel() == 8
    assert others == [(2, False), (2, False)]
    assert len(made) == 2


def test_devices_that_do_not_reach_each_other_are_refused(monkeypatch):
    def rebuild(storage_device, event_sync_required):
        raise RuntimeError("peer access is not supported between these two devices\nmore")

    with pytest.raises(RuntimeError, match="cannot read the memory of rank 1 of this machine"):
        share(monkeypatch, rebuild)


def test_devices_that_share_nothing_are_refused(monkeypatch):
    with pytest.raises(RuntimeError, match="shares no memory of cpu between processes"):
        share(monkeypatch, lambda storage, metadata: None)
