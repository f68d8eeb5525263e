"""Connections to the store of a run."""

import gc

import torch.distributed as dist

from lightning_pipeoffload.processes.run_store import connect_store


def values_of_two_process_groups():
    """Make a process group twice, at one port; return what each of their stores keeps."""
    values = []
    for number in range(2):
        dist.init_process_group("gloo", rank=0, world_size=1)
        connect_store("run", "board", None).set("key", str(number))
        values.append(connect_store("run", "board", None).get("key"))
        dist.destroy_process_group()
        gc.collect()
    return values


def test_a_connection_ends_with_its_process_group(ranks):
    assert ranks(1).run(values_of_two_process_groups) == [[b"0", b"1"]]
