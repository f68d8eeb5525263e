"""Sums that reach one replica each, over gloo; one pool of three for the whole file."""

import os

import pytest
import torch
import torch.distributed as dist

from lightning_pipeoffload.runtime.comm import SumsToOwners, sums_to_owners
from tests.support.rank_pool import RankPool

NUM = 3


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(NUM)
    yield pool
    pool.close()


def values(replica, lengths):
    return torch.randn(sum(lengths), generator=torch.Generator().manual_seed(replica))


def sums(all_lengths, adds_parts, piece_bytes):
    """Return this replica's parts of some sums, which are under way together."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]))
    own = dist.get_rank()
    sums_to_owners._PIECE_BYTES, sums_to_owners._MOST_RECEIVED = piece_bytes, 4 * piece_bytes
    to_owners = SumsToOwners(dist.group.WORLD, own, range(NUM))
    to_owners._adds_parts = adds_parts
    flats = [values(own, lengths) for lengths in all_lengths]
    waits = [to_owners.start(*each) for each in zip(flats, all_lengths, strict=True)]
    for wait in reversed(waits):  # in any order
        wait()
    pairs = zip(flats, all_lengths, strict=True)
    return [flat.split(lengths)[own].tolist() for flat, lengths in pairs]


LENGTHS = [[5, 0, 3], [0, 1000, 0], [2, 2, 2], [0, 0, 700]]


@pytest.mark.parametrize(("adds_parts", "piece_bytes"), [(True, 1 << 20), (True, 64), (False, 64)])
def test_each_owner_gets_the_sum_of_its_part(pool, adds_parts, piece_bytes):
    found = pool.run(sums, LENGTHS, adds_parts, piece_bytes)
    for place, lengths in enumerate(LENGTHS):
        first, *others = (values(replica, lengths) for replica in range(NUM))
        for other in others:  # in the order of the replicas
            first += other
        for replica, part in enumerate(first.split(lengths)):
            mine = torch.tensor(found[replica][place])
            torch.testing.assert_close(mine, part, rtol=0, atol=0 if adds_parts else 1e-6)
