import pytest
import torch

from lightning_pipeoffload.runtime import PATCHES


@pytest.fixture(autouse=True)
def one_thread():
    """Let no test start torch's threads, nor see another test's random numbers or patches."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    PATCHES.close()
