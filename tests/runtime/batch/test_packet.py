"""A batch as bytes: rebuilt as it was, in memory of its own, or refused with the place."""

import threading

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from lightning_pipeoffload.runtime.batch import Packet, ReceivedPacket

BASE = torch.arange(20)
BATCH = {
    "view": BASE[:10],
    "next": BASE[1:11],
    "transposed": torch.randn(3, 4).t(),
    "expanded": torch.ones(1).expand(5),
    "empty": torch.empty(0, 3),
    "number": torch.tensor(True),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "sparse": torch.eye(3).to_sparse(),
    "column of a data set": torch.arange(1e5).view(1000, 100)[:, 3],
    "packed": pack_sequence([torch.ones(3), torch.ones(2)]).data,
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "array": np.arange(5),
    "no array": np.empty(0),
    "texts": ["one", "two"],
}


def sent(batch):
    packet = Packet(batch)
    buffer = torch.full((packet.num_bytes + 8,), 7, dtype=torch.uint8)
    packet.write(buffer)
    contents = ReceivedPacket(packet.structure, buffer)
    contents.copy()
    buffer.zero_()
    return contents.rebuild(torch.device("cpu"))


@pytest.mark.parametrize("name", BATCH)
def test_what_was_sent_is_what_comes(name):
    value, rebuilt = BATCH[name], sent({"x": BATCH[name]})["x"]
    if isinstance(value, torch.Tensor):
        torch.testing.assert_close(rebuilt, value, rtol=0, atol=0)
        assert (type(rebuilt), rebuilt.requires_grad) == (type(value), value.requires_grad)
    else:
        np.testing.assert_equal(rebuilt, value)


def test_tensors_of_one_memory_stay_so_and_the_senders_is_another():
    rebuilt = sent({**BATCH, "again": BATCH["view"]})
    assert rebuilt["again"] is rebuilt["view"]
    rebuilt["view"][1] = -1
    assert rebuilt["next"][0] == -1
    assert BASE[1] == 1


def test_of_a_large_storage_only_what_the_batch_has_is_sent():
    assert Packet(BATCH["column of a data set"]).num_bytes < 5000


class Graph:
    """Holds what cannot be pickled."""

    def __init__(self):
        self.nodes, self.lock = torch.ones(2), threading.Lock()


def test_what_cannot_be_pickled_is_refused_with_its_place():
    with pytest.raises(TypeError, match=r"batch\['graphs'\]\[1\]\.lock is a lock that cannot be"):
        Packet({"x": BASE, "graphs": [1, Graph()]})
