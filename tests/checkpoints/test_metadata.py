"""A checkpoint folder's metadata is read as data: nothing that it names runs."""

import os
import pickle
import subprocess
from pathlib import Path, PurePath

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, save
from torch.distributed.checkpoint.metadata import Metadata

from lightning_pipeoffload.checkpoints.folder import MetadataReader


class Evil:
    def __init__(self, call, *args):
        self.call = call, args

    def __reduce__(self):
        return self.call


def test_it_reads_what_torch_reads(tmp_path):
    dtypes = (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
    model = {str(dtype): torch.ones(2, 3).to(dtype) for dtype in dtypes}
    model["last"] = nn.Conv2d(2, 3, 1).to(memory_format=torch.channels_last).weight.data
    save({"model": model, "optimizer_0": {"step": 3, "groups": [1, 2]}}, checkpoint_id=tmp_path)
    found, plain = (
        reader(tmp_path).read_metadata() for reader in (MetadataReader, FileSystemReader)
    )
    assert found.storage_meta.load_id
    plain.storage_meta.load_id = found.storage_meta.load_id
    assert found == plain


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (Evil(os.system, "touch ran"), "posix.system"),
        (Evil(subprocess.Popen, ["touch", "ran"]), "subprocess.Popen"),
        (Evil(eval, "open('ran', 'w')"), "builtins.eval"),
        (Evil(torch.load, "other"), "torch.serialization.load"),
        (Evil(getattr, PurePath("a"), "name"), "builtins.getattr"),
    ],
)
def test_code_in_it_is_refused_by_name(tmp_path, monkeypatch, call, name):
    monkeypatch.chdir(tmp_path)
    Path(".metadata").write_bytes(pickle.dumps(Metadata({}, planner_data=call)))
    with pytest.raises(ValueError, match=rf"\.metadata cannot be read: it refers to {name}, which"):
        MetadataReader(tmp_path).read_metadata()
    assert [path.name for path in tmp_path.iterdir()] == [".metadata"]


def test_something_else_is_refused(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    with pytest.raises(ValueError, match="has a dict, not a Metadata"):
        MetadataReader(tmp_path).read_metadata()
    (tmp_path / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(ValueError, match=r"\.metadata cannot be read: invalid load key"):
        MetadataReader(tmp_path).read_metadata()
