from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.rank_pool import RankPool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the files whose ranks wait for each other among those that compute.

    Workers take files in this order, and so keep the cores busy from beginning to end.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    waiting = [path for path, tests in files.items() if any(map(_has_ranks, tests))]
    computing = [path for path in files if path not in waiting]
    places = {
        path: (index + 0.5) / len(paths)
        for paths in (waiting, computing)
        for index, path in enumerate(paths)
    }
    items[:] = [item for path in sorted(files, key=places.__getitem__) for item in files[path]]


def _has_ranks(test: pytest.Item) -> bool:
    fixtures: list[str] = getattr(test, "fixturenames", [])
    return "ranks" in fixtures or "processes" in test.path.parts


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


@pytest.fixture(autouse=True)
def _an_environment_of_its_own() -> Iterator[None]:
    """Take back what a fit leaves: whoever inherits LOCAL_RANK believes that others start ranks."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    torch.use_deterministic_algorithms(False)  # as Trainer(deterministic=True) does for good
