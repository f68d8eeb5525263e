"""On an accelerator autograd has threads of its own; B and W do not run in them."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

from lightning_pipeoffload import defer_weight_grad
from lightning_pipeoffload.runtime.step import sharing_casts
from lightning_pipeoffload.schedule import build
from tests.runtime.step.test_autocast import CountCasts
from tests.support.in_process import InProcessPipeline
from tests.support.rank_pool import RankPool
from tests.support.small_modules import Regression, assert_same, call_step, run_pipeline, run_plain

__threads__ = []
"""Those in which backwards on the device have run; no name that the pipeline would watch."""


class _Module(_DummyBackendModule):  # type: ignore[misc]
    def is_initialized(self):
        return False  # it has no random numbers, nor a clock

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]


def set_up_device():
    __threads__.clear()
    if not hasattr(torch, "toy"):  # a CUDA build names CUDA where there is none
        _setup_privateuseone_for_python_backend("toy", _Module())


def _on_device(tensor):
    return torch._C._acc.create_empty_tensor(tensor.shape, tensor.dtype)


class _There(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, aside):
        ctx.aside = aside
        ctx.save_for_backward(x)
        aside.append(x.detach())
        return _on_device(x)

    @staticmethod
    def backward(ctx, grad):
        __threads__.append(threading.get_ident())
        ctx.saved_tensors  # noqa: B018 - in a checkpoint this computes the block again
        return ctx.aside.pop(), None


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, aside):
        ctx.aside = aside
        return aside.pop()

    @staticmethod
    def backward(ctx, grad):
        ctx.aside.append(grad)
        return _on_device(grad), None


def through_device(x):
    """Return x, whose gradient goes through the device's thread."""
    aside = []
    return _Back.apply(_There.apply(x, aside), aside)


class Block(nn.Module):
    """A layer whose backward is on the device, or not."""

    def __init__(self, on_device=True):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.then = through_device if on_device else nn.Identity()

    def forward(self, x):
        return self.then(self.linear(x))


CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def process():
    """A process of its own, that may have the device."""
    pool = RankPool(1)
    yield pool
    pool.close()


class Late(torch.autograd.Function):
    """A product with a scale, whose gradient goes through the device too."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        defer_weight_grad(ctx.scale, lambda: gradient_through_device(ctx.scale, x, grad))
        return grad * ctx.scale, None


@torch.enable_grad()
def gradient_through_device(scale, x, grad):
    scale = scale.detach().requires_grad_()
    return torch.autograd.grad(through_device(x * scale), scale, grad)[0]


class Scaled(Block):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return Late.apply(super().forward(x), self.scale)


def threads_of_a_step(schedule):
    """Return whether the device's backwards ran in this thread: of a plain backward, and a step."""
    set_up_device()
    through_device(torch.ones(2, requires_grad=True)).sum().backward()
    blocks = [Scaled() for _ in range(4)]
    pipeline = InProcessPipeline(Regression(blocks), build(schedule, 2, 4), call_step)
    pipeline.run(torch.ones(4, 4), 1)
    return [thread == threading.get_ident() for thread in __threads__]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_v"])
def test_b_and_w_run_in_the_thread_that_calls_them(process, schedule):
    ((plain, *threads),) = process.run(threads_of_a_step, schedule)
    assert not plain
    assert threads == [True] * (2 * 4 * 4)


class Penalized(nn.Module):
    """Starts a backward itself, in F, which is in the device's thread."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = through_device(self.linear(x))
        (slope,) = torch.autograd.grad(y.pow(2).sum(), x, retain_graph=True)
        return y + slope


def compare_penalized():
    set_up_device()
    module = Regression([Penalized() for _ in range(4)]).double()
    x = torch.randn(4, 4).double()
    assert_same(run_pipeline(module, build("zb_h1", 2, 4), x, 1), run_plain(module, x, 1))
    return len({*__threads__})


def test_a_backward_that_the_user_starts_may_be_in_the_devices_thread(process):
    assert process.run(compare_penalized) == [2]


def count_casts(on_device):
    """Count the casts of weights in a checkpointed step of one rank in bfloat16."""
    set_up_device()
    module = Regression([Block(on_device) for _ in range(4)])
    pipeline = InProcessPipeline(module, build("zb_h1", 1, 4), call_step, recompute="full")
    with (
        torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        CountCasts() as casts,
        sharing_casts(CPU),
    ):
        pipeline.run(torch.ones(4, 4), 1)
    return casts.count


def test_a_checkpointed_step_casts_as_often_as_in_the_main_thread(process):
    (found,), (expected,) = process.run(count_casts, True), process.run(count_casts, False)
    assert found == expected == 2 * 6
