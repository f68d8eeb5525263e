"""W adds products of bfloat16 to float32 gradients in one pass where it is asked to and can."""

import copy
from contextlib import contextmanager, nullcontext

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.runtime import PATCHES
from lightning_pipeoffload.runtime.step import sharing_casts
from lightning_pipeoffload.runtime.weight_grad import (
    WeightGradQueue,
    add_product_in_float32,
    add_product_to_grad,
    deferring_kernels,
    mark_deferrable,
    supports_float32_accumulation,
)
from lightning_pipeoffload.schedule import build
from tests.support.in_process import InProcessPipeline
from tests.support.small_modules import Regression, call_step, linear_blocks

CPU = torch.device("cpu")
FUSED, UNFUSED = ({"gradient_accumulation_fusion": value} for value in (True, False))


@pytest.fixture
def one_pass():
    """Give the CPU the two operators that CUDA has."""

    def mm(left, right, out_dtype):
        return left.to(out_dtype) @ right.to(out_dtype)

    def addmm(total, left, right, out_dtype, *, beta=1, alpha=1, out):
        return out.copy_(total + mm(left, right, out_dtype))

    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", mm, "CPU")
    library.impl("addmm.dtype_out", addmm, "CPU")
    yield
    library._destroy()


@pytest.fixture
def kernels():
    PATCHES.enter(deferring_kernels, "cpu")


class Allocated(TorchDispatchMode):
    """Counts bytes of results that are in no memory of the arguments."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {address(leaf) for leaf in tree_leaves((args, kwargs)) if is_tensor(leaf)}
        result = func(*args, **(kwargs or {}))
        new = [leaf for leaf in tree_leaves(result) if is_tensor(leaf)]
        self.bytes += sum(leaf.nbytes for leaf in new if address(leaf) not in given)
        return result


def is_tensor(leaf):
    return isinstance(leaf, torch.Tensor)


def address(tensor):
    return tensor.untyped_storage().data_ptr()


KINDS = ["cast weights", "grad_dtype"]


def of_kind(kind, module):
    """Return the module, or in bfloat16 with float32 gradients."""
    if kind == "grad_dtype":
        for parameter in module.bfloat16().parameters():
            parameter.grad_dtype = torch.float32
    return module


@contextmanager
def precision(kind):
    mixed = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    with mixed if kind == "cast weights" else nullcontext(), sharing_casts(CPU):
        yield


@pytest.mark.parametrize("immediate", [False, True], ids=["W", "BW"])
@pytest.mark.parametrize("kind", KINDS)
def test_w_allocates_nothing_and_rounds_once(one_pass, kernels, kind, immediate):
    linear = of_kind(kind, nn.Linear(32, 16, bias=False))
    mark_deferrable(linear.weight)
    xs = torch.randn(3, 64, 32).bfloat16().requires_grad_()
    grads, found, allocated = torch.randn(3, 64, 16).bfloat16(), {}, {}
    for add in (add_product_to_grad, add_product_in_float32):
        linear.weight.grad, counts = None, []
        for x, grad in zip(xs, grads, strict=True):
            queue = WeightGradQueue(immediate, add_product=add)
            with queue, precision(kind):
                y = linear(x)
            with queue, Allocated() as in_b:
                y.backward(grad)
            with Allocated() as in_w:
                queue.run()
            counts.append((in_b if immediate else in_w).bytes)
        found[add], allocated[add] = linear.weight.grad, counts[-1]
        assert linear.weight.grad.dtype == torch.float32
    exact = sum(grad.double().T @ x.double() for grad, x in zip(grads, xs, strict=True))
    errors = {add: (gradient - exact).abs().max() for add, gradient in found.items()}
    assert errors[add_product_in_float32] < 1e-4 < 1e-2 < errors[add_product_to_grad]
    saved = allocated[add_product_to_grad] - allocated[add_product_in_float32]
    assert saved == 2 * linear.weight.numel()  # the product in bfloat16
    assert immediate or allocated[add_product_in_float32] == 0


def gradients(module, kind, schedule, num_ranks=2, **options):
    torch.manual_seed(1)
    batch = torch.randn(8, 4)
    batch = batch if kind == "cast weights" else batch.bfloat16()
    pipeline = InProcessPipeline(module, build(schedule, num_ranks, 4), call_step, **options)
    for rank in pipeline.ranks:
        of_kind(kind, rank.module)  # a copy of a parameter has no grad_dtype
    with precision(kind):
        pipeline.run(batch, 2)
    return pipeline.named_gradients()


@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_adds_up_alike(one_pass, kind):
    module = Regression(linear_blocks(8))
    alone = gradients(module, kind, "gpipe", 1, **FUSED)
    for schedule in ("1f1b", "zb_h1", "zb_v"):
        found = gradients(module, kind, schedule, **FUSED)
        torch.testing.assert_close(found, alone, rtol=0, atol=0)
    twice = gradients(module, kind, "zb_h1")
    torch.testing.assert_close(alone, twice, rtol=2e-2, atol=2e-2)
    assert not torch.equal(alone["blocks.0.weight"], twice["blocks.0.weight"])
    assert torch.equal(alone["blocks.0.bias"], twice["blocks.0.bias"])  # a sum, no product


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_weight_see_what_they_would(one_pass, hook):
    weight = nn.Parameter(torch.zeros(4, 4))
    called = []
    getattr(weight, hook)(called.append)
    cast = weight.bfloat16()
    for _ in range(2):
        add_product_in_float32(cast, *torch.ones(2, 4, 4).bfloat16())
    assert len(called) == 2
    assert torch.equal(weight.grad, torch.full((4, 4), 8.0))


class Task(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*linear_blocks(4))

    def training_step(self, x, batch_idx):
        return self.net(x).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(task, **options):
    task = copy.deepcopy(task)
    torch.manual_seed(2)
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=PipeOffloadStrategy(schedule="zb_h1", **options),
        precision="bf16-mixed", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(task, DataLoader(torch.randn(16, 4), 8))
    return task.state_dict()


def test_a_trainer_adds_up_in_one_pass_where_the_device_can(one_pass):
    task = Task()
    found, twice = trained(task), trained(task, **UNFUSED)
    torch.testing.assert_close(found, twice, rtol=1e-2, atol=1e-2)
    assert not torch.equal(found["net.0.weight"], twice["net.0.weight"])
    torch.testing.assert_close(found, trained(task, **FUSED), rtol=0, atol=0)


def test_compiled_blocks_add_up_in_one_pass_too(one_pass):
    task, compiled = Task(), {"compile": {"backend": "aot_eager"}}
    found, eager = trained(task, **compiled), trained(task)
    torch.testing.assert_close(found, eager, rtol=1e-6, atol=1e-6)
    twice = trained(task, **UNFUSED, **compiled)
    assert not torch.equal(found["net.0.weight"], twice["net.0.weight"])


def test_elsewhere_it_adds_up_as_without_and_says_so(caplog):
    assert not supports_float32_accumulation(CPU)
    task = Task()
    torch.testing.assert_close(trained(task, **FUSED), trained(task), rtol=0, atol=0)
    (said,) = [line for line in caplog.messages if "gradient_accumulation_fusion" in line]
    assert said == (
        "gradient_accumulation_fusion=True changes nothing here: a rank's device has no product of "
        "matrices that adds to float32, so gradients are added in a second pass"
    )
