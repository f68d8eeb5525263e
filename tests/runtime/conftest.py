import pytest
import torch

from lightning_pipeoffload.runtime.weight_grad import kernels as weight_grad_kernels


@pytest.fixture(autouse=True)
def one_thread():
    """Let no test start torch's threads, nor see another test's random numbers or kernels."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    weight_grad_kernels.remove_kernels()
