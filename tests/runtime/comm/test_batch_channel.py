"""Batches from the process that reads to the others of its replica."""

import os

import pytest
import torch

from lightning_pipeoffload.runtime.comm import BatchChannel, RankMesh, batch_channel
from lightning_pipeoffload.runtime.comm.shared_bytes import MemoryFile
from lightning_pipeoffload.schedule import build

LARGE = 1 << 18  # elements
SIZES = [1, 900, 5000, LARGE, LARGE // 2, 3, 2 * LARGE, LARGE]


def exchange(way):
    """Send batches; return what others receive, who take one before they use the one before it."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.distributed.init_process_group("gloo", rank=rank, world_size=3)
    plain = batch_channel.read_memory_file, MemoryFile.try_reserve
    if way == "another machine" and rank == 1:
        batch_channel.read_memory_file = lambda path: b""
    if way == "no memory":
        MemoryFile.try_reserve = lambda file, size: "" if size < 100 else "too little"
    try:
        mesh = RankMesh(build("1f1b", 3, 3), rank)
        channel = BatchChannel(mesh)
        batches = [{"x": torch.arange(size), "n": number} for number, size in enumerate(SIZES)]
        if channel.is_reader:
            for number, batch in enumerate(batches):
                channel.send(number, [batch, "with it"])
            return None
        found, coming = [], []
        for number in range(len(SIZES) + 1):
            if number < len(SIZES):
                header, values = channel.receive()
                assert header == number
                coming.append(values)
            if number:
                batch, text = (value.get() for value in coming.pop(0))
                is_whole = torch.equal(batch["x"], torch.arange(len(batch["x"])))
                found.append((batch["n"], is_whole, text))
                batch["x"].zero_()
        return found, channel._maps_slots
    finally:
        batch_channel.read_memory_file, MemoryFile.try_reserve = plain
        torch.distributed.barrier()


@pytest.mark.parametrize("way", ["one machine", "another machine", "no memory"])
def test_batches_come_in_order_by_shared_memory_and_by_messages(ranks, way):
    none, *found = ranks(3).run(exchange, way)
    assert none is None
    for rank, (batches, maps) in enumerate(found, 1):
        assert batches == [(number, True, "with it") for number in range(len(SIZES))]
        assert maps is not (way == "another machine" and rank == 1)
