"""A checkpoint's file is written and read one tensor at a time."""

import os
import pickle
import zipfile
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter, save

from lightning_pipeoffload.checkpoints.file import AtomicCheckpointIO
from lightning_pipeoffload.checkpoints.folder import (
    read_checkpoint_folder,
    refuse_incomplete_folder,
)
from lightning_pipeoffload.checkpoints.saved_values import (
    DeferredTensor,
    picklable_shapes,
    to_shape_only,
)
from lightning_pipeoffload.runtime import StoredTensor

DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint16)
DTYPES = (*DTYPES, torch.float8_e4m3fn)


def raw(tensor):
    return tensor.flatten().view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5)], ids=str)
def test_what_comes_late_is_loaded_as_any_other_tensor(dtype, shape, tmp_path):
    value = torch.randint(0, 100, shape).to(dtype)
    late = DeferredTensor(value.to("meta"), lambda: value)
    torch.save({"late": [late, late], "state_dict": {"there": value}}, tmp_path / "file.ckpt")
    first, second = torch.load(tmp_path / "file.ckpt", weights_only=True)["late"]
    assert (first.dtype, first.shape, raw(first)) == (dtype, value.shape, raw(value))
    assert first.data_ptr() == second.data_ptr()
    assert zipfile.ZipFile(tmp_path / "file.ckpt").testzip() is None
    stored = AtomicCheckpointIO().load_checkpoint(tmp_path / "file.ckpt")["state_dict"]["there"]
    assert isinstance(stored, StoredTensor)
    assert raw(stored.value()) == raw(value)


def test_shapes_that_are_sent_are_those_of_all_entries():
    inner = OrderedDict(a=torch.ones(2, 3).t(), b=[torch.ones(1), 2.0], c=None)
    entries = {"weight": nn.Parameter(torch.ones(4)), "states": {0: {"extra": inner}}}
    sent = pickle.loads(pickle.dumps(picklable_shapes(entries, 1)))
    assert repr(sent) == repr(to_shape_only(entries, 1))
    assert sent["states"][0]["extra"]["a"].stride() == inner["a"].stride()


@pytest.fixture
def saved(tmp_path):
    """A checkpoint with all kinds of places, and where it is."""
    module = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(module.parameters(), lr=torch.tensor(0.1))
    module(torch.ones(1, 2, 4, 4)).sum().backward()
    optimizer.step()
    shared = torch.arange(4.0)
    checkpoint = {
        "state_dict": module.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "callbacks": {"average": {"all": shared, "part": shared[1:3]}},
        "epoch": 3,
    }
    torch.save(checkpoint, tmp_path / "file.ckpt")
    return checkpoint, tmp_path / "file.ckpt"


def test_only_what_ranks_share_out_is_read_later(saved, monkeypatch):
    checkpoint, path = saved
    reads = []
    monkeypatch.setattr(StoredTensor, "value", lambda stored: reads.append(stored))
    found = AtomicCheckpointIO().load_checkpoint(path, weights_only=True)
    assert (reads, found["epoch"]) == ([], 3)
    assert all(isinstance(value, StoredTensor) for value in found["state_dict"].values())
    [states] = found["optimizer_states"]
    assert isinstance(states["state"][0]["exp_avg"], StoredTensor)
    assert type(states["param_groups"][0]["lr"]) is torch.Tensor
    average = found["callbacks"]["average"]
    average["all"][1] = 7
    assert average["part"].tolist() == [7, 2]


def test_what_is_read_is_what_was_saved(saved):
    checkpoint, path = saved
    found = AtomicCheckpointIO().load_checkpoint(path)
    os.remove(path)  # what is open stays
    weight = found["state_dict"]["weight"].value()
    assert weight.stride() == checkpoint["state_dict"]["weight"].stride()
    for key in ("state_dict", "optimizer_states", "callbacks"):
        torch.testing.assert_close(found[key], checkpoint[key], rtol=0, atol=0)


def test_a_file_of_the_old_format_is_read_at_once(saved):
    checkpoint, path = saved
    torch.save(checkpoint, path, _use_new_zipfile_serialization=False)
    found = AtomicCheckpointIO().load_checkpoint(path)
    assert type(found["state_dict"]["weight"]) is torch.Tensor


def read(folder):
    refuse_incomplete_folder(folder) if not (folder / "meta.pt").exists() else None
    rest = AtomicCheckpointIO().load_checkpoint(folder / "meta.pt")
    whole = read_checkpoint_folder(folder, rest, weights_only=True, fits=False)
    return whole["state_dict"]["weight"].value()


@pytest.mark.filterwarnings("ignore:torch.distributed")
@pytest.mark.parametrize("name", ["meta.pt", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("share", [None, 0, 0.5, 0.9])
def test_a_damaged_or_missing_file_of_a_folder_is_named(tmp_path, name, share):
    save({"model": {"weight": torch.ones(1000)}}, storage_writer=FileSystemWriter(tmp_path))
    torch.save({"epoch": 1, "loops": torch.ones(1000)}, tmp_path / "meta.pt")
    assert torch.equal(read(tmp_path), torch.ones(1000))
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink()
    if share is not None:
        (tmp_path / name).write_bytes(whole[: int(share * len(whole))])
    error = FileNotFoundError if share is None else (RuntimeError, ValueError)
    with pytest.raises(error, match=name.replace(".", r"\.")):
        read(tmp_path)


def test_a_file_that_is_not_there_is_not_called_damaged(tmp_path):
    with pytest.raises(FileNotFoundError, match="not found"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "none.ckpt")
