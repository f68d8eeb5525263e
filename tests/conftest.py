from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """Give the pool of so many rank processes."""
    pools: dict[int, RankPool] = {}

    def get(size: int) -> RankPool:
        if size in pools and pools[size].is_broken:
            pools.pop(size).close()
        if size not in pools:
            pools[size] = RankPool(size)
        return pools[size]

    yield get
    for pool in pools.values():
        pool.close()
