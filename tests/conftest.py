import gc
import os
import shutil
import time
import zlib

import pytest

from tests.support.caches import begin_session, new_caches

CACHES = pytest.StashKey()
DEADLINE = pytest.StashKey()
NUM_PARTS = 8

# What runs no tests itself, as xdist's controller, needs no torch: it is imported in the fixtures.


def pytest_addoption(parser):
    parser.addoption(
        "--part",
        type=int,
        choices=range(NUM_PARTS),
        help="run this eighth of the tests alone; a test's name decides its eighth",
    )
    parser.addoption(
        "--minutes", type=float, help="skip the tests that have not begun after so many minutes"
    )


def pytest_configure(config):
    """Keep the plans and choices of other sessions out of this one's, and the other way round."""
    config.stash[CACHES] = begin_session()
    minutes = config.getoption("minutes")
    config.stash[DEADLINE] = float("inf") if minutes is None else time.monotonic() + 60 * minutes


def pytest_collection_modifyitems(config, items):
    """Deselect the tests of other parts: `make slow PART=3`."""
    part = config.getoption("part")
    if part is None:
        return
    of_part, others = [], []
    for item in items:
        here = zlib.crc32(item.nodeid.encode()) % NUM_PARTS == part
        (of_part if here else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = of_part


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Skip what has no time left, so that a failure of what has run still fails the run."""
    if time.monotonic() > item.config.stash[DEADLINE]:
        pytest.skip(f"not run: --minutes {item.config.getoption('minutes'):g} are over")


def pytest_collection_finish():
    """Leave what is imported out of Python's collections: one follows each fit in this process."""
    gc.freeze()


def pytest_unconfigure(config):
    shutil.rmtree(config.stash[CACHES], ignore_errors=True)


@pytest.fixture(scope="session")
def ranks():
    """Give the pool of so many rank processes."""
    from tests.support.rank_pool import RankPool

    pools = {}

    def get(size):
        if size in pools and not pools[size].is_of_use:
            pools.pop(size).close()
        if size not in pools:
            pools[size] = RankPool(size)
        return pools[size]

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture(autouse=True)
def _an_environment_of_its_own():
    """Take back what a fit leaves: whoever inherits LOCAL_RANK believes that others start ranks."""
    import torch
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    from tests.support.rank_pool import end_groups

    before, rank = dict(os.environ), getattr(rank_zero_only, "rank", 0)
    had_groups = torch.distributed.is_initialized()  # of a fixture of several tests
    os.environ["XDG_CACHE_HOME"] = new_caches()
    yield
    os.environ.clear()
    os.environ.update(before)
    rank_zero_only.rank = rank  # else what global rank 0 says is silent in later tests
    if torch.distributed.is_initialized() and not had_groups:
        end_groups()  # those of a fit in this process
    torch.use_deterministic_algorithms(False)  # as Trainer(deterministic=True) does for good
