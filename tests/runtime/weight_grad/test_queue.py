"""Each kind of weight gets the gradient, and each hook the calls, that plain autograd gives."""

import copy
import threading
import time
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_pipeoffload import defer_weight_grad
from lightning_pipeoffload.runtime import PATCHES
from lightning_pipeoffload.runtime.weight_grad import (
    Linear,
    RegroupedWeightGrads,
    WeightGradQueue,
    deferring_kernels,
    mark_deferrable,
)
from lightning_pipeoffload.runtime.weight_grad.kernels import _KERNELS
from lightning_pipeoffload.runtime.weight_grad.queue import add_to_grad


class Product(nn.Module):
    """A matrix and a vector, and a function of them and of x ``[rows, 4]``."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.bias = nn.Parameter(torch.randn(4))
        self.function = function

    def forward(self, x):
        return self.function(self.weight, self.bias, x)


class Attention(nn.Module):
    def __init__(self, cross=False):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.cross = cross

    def forward(self, x):
        x = x[None]
        other = x.flip(1) if self.cross else x
        return self.attention(x, other, other)[0]


class Over(nn.Module):
    """A convolution over x seen as channels and pixels."""

    def __init__(self, convolution, shape):
        super().__init__()
        self.convolution = convolution
        self.shape = shape

    def forward(self, x):
        return self.convolution(x.reshape(self.shape))


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def linear_with_frozen(name):
    linear = nn.Linear(4, 4)
    linear.get_parameter(name).requires_grad_(False)
    return linear


def both(x, weights):
    first, second = weights
    return x[:, : len(first)] @ first + x[:, : len(second)] @ second


# The name of a call; how many gradients of it wait for W; the call, of weight w, bias b and x.
PRODUCTS = {
    "linear twice": (2, lambda w, b, x: functional.linear(functional.linear(x, w), w)),
    "x @ w": (1, lambda w, b, x: x @ w + b),
    "batched x @ w": (1, lambda w, b, x: x[None] @ w),
    "w @ x": (1, lambda w, b, x: w @ x.t()),
    "w @ x, viewed": (1, lambda w, b, x: (w @ x.t()).view(-1)),
    "a bias of one number": (2, lambda w, b, x: functional.linear(x @ w, w, b[:1])),
    "addmm with a bias of one number": (1, lambda w, b, x: torch.addmm(b[:1], x, w)),
    "addmm with a bias for each row": (0, lambda w, b, x: torch.addmm(b.expand(len(x), 4), x, w)),
    "linear of one vector": (0, lambda w, b, x: functional.linear(x, w[0])),
    "x @ w.t()": (1, lambda w, b, x: x @ w.t()),
    "w.t() @ x": (1, lambda w, b, x: w.t() @ x.t()),
    "addmm": (1, lambda w, b, x: torch.addmm(b, x, w)),
    "view of a weight": (1, lambda w, b, x: functional.linear(x[:, :2], w.view(8, 2))),
    "row of a weight": (1, lambda w, b, x: functional.linear(x, w[:2])),
    "chunks of a weight": (2, lambda w, b, x: both(x, w.chunk(2, 1))),
    "parts of a weight": (2, lambda w, b, x: both(x, w.split([1, 3]))),
    "weights in a stack": (2, lambda w, b, x: both(x, w.view(2, 2, 4).unbind())),
    "cast of a weight": (1, lambda w, b, x: x.float() @ w.float()),
    "scaled addmm": (0, lambda w, b, x: torch.addmm(b, x, w, alpha=2)),
    "product of weights": (0, lambda w, b, x: x @ (w * b)),
    "einsum": (1, lambda w, b, x: torch.einsum("ni,io->no", x, w)),
    "einsum, weight first": (1, lambda w, b, x: torch.einsum("oi,bni->bno", w, x[None])),
    "einsum by heads": (1, lambda w, b, x: torch.einsum("nd,hkd->nhk", x, w.view(2, 2, 4))),
    "einsum from heads": (
        1,
        lambda w, b, x: torch.einsum("nhk,hkd->nd", x.view(-1, 2, 2), w.view(2, 2, 4)),
    ),
    "einsum with three operands": (1, lambda w, b, x: torch.einsum("ni,io,o->no", x, w, b)),
    "bmm": (1, lambda w, b, x: x.view(2, -1, 2).bmm(w.view(2, 2, 4))),
    "bmm, weight first": (1, lambda w, b, x: w.view(2, 4, 2).bmm(x.view(2, 2, -1))),
}


def with_hook_on_view(w, b, x):
    view = w.t()
    view.register_hook(lambda gradient: gradient * gradient.abs())
    return (x @ view).tanh() @ view


PRODUCTS["view with a hook"] = (0, with_hook_on_view)
MODULES = {
    "linear": (1, lambda: nn.Linear(4, 3)),
    "linear without bias": (1, lambda: nn.Linear(4, 3, bias=False)),
    "linear with frozen bias": (1, lambda: linear_with_frozen("bias")),
    "linear with frozen weight": (0, lambda: linear_with_frozen("weight")),
    "conv1d": (1, lambda: Over(nn.Conv1d(4, 3, 3, padding=1), (2, 4, 3))),
    "conv1d without bias": (1, lambda: Over(nn.Conv1d(4, 3, 3, bias=False), (2, 4, 3))),
    "grouped conv2d": (1, lambda: Over(nn.Conv2d(2, 4, 2, stride=2, groups=2), (1, 2, 4, 3))),
    "transposed conv1d": (1, lambda: Over(nn.ConvTranspose1d(4, 3, 2), (2, 4, 3))),
    "transposed conv2d": (1, lambda: Over(nn.ConvTranspose2d(2, 3, 2, stride=2), (1, 2, 4, 3))),
    "self attention": (2, Attention),
    "cross attention": (3, lambda: Attention(cross=True)),
    "layer norm": (0, lambda: nn.LayerNorm(4)),
    "weight norm": (0, lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
}
CALLS = MODULES | {
    name: (count, partial(Product, function)) for name, (count, function) in PRODUCTS.items()
}


@pytest.fixture(autouse=True)
def kernels():
    PATCHES.enter(deferring_kernels, "cpu")


def mark_all(module):
    for parameter in module.parameters():
        mark_deferrable(parameter)
    return module


def gradients(module, x):
    return {"x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


def backward(module, x, call=None):
    """Run F, B and W; return the gradients, and how many of them were left for W."""
    queue = WeightGradQueue()
    with queue:
        (call or module)(x).pow(2).sum().backward()
    waiting = len(queue.pending)
    queue.run()
    queue.run()  # of nothing: what ran is gone
    return gradients(module, x), waiting


def plain(module, x, call=lambda module, x: module(x)):
    module, x = copy.deepcopy(module), x.detach().clone().requires_grad_(x.requires_grad)
    call(module, x).pow(2).sum().backward()
    return gradients(module, x)


def make_input(requires_grad=True):
    return torch.randn(6, 4, dtype=torch.float64).requires_grad_(requires_grad)


@pytest.mark.parametrize("first_layer", [False, True])
@pytest.mark.parametrize(("count", "make"), CALLS.values(), ids=CALLS)
def test_gradients_are_plains(count, make, first_layer):
    module, x = make().double(), make_input(requires_grad=not first_layer)
    expected = plain(module, x)
    found, waiting = backward(mark_all(module), x)
    torch.testing.assert_close(found, expected)
    assert waiting == count
    found, _ = backward(module, x)
    torch.testing.assert_close(found, twice_as_much(expected))


def twice_as_much(gradients):
    return {name: None if g is None else 2 * g for name, g in gradients.items()}


COMPLEX = {name: call for name, call in PRODUCTS.items() if not name.startswith("cast")} | {
    "conjugated input": (1, lambda w, b, x: torch.addmm(b, x.conj(), w)),
    "conjugated weight": (0, lambda w, b, x: x @ w.conj()),
    "adjoint of a weight": (0, lambda w, b, x: functional.linear(x.conj(), w.mH, b)),
    "real part of a weight": (0, lambda w, b, x: x @ w.real.to(x.dtype)),
    "parts of numbers": (0, lambda w, b, x: torch.complex(x.real @ w.real, x.imag @ w.conj().imag)),
}
COMPLEX_CALLS = {name: MODULES[name] for name in MODULES if "linear" in name} | {
    name: (0, MODULES[name][1]) for name in MODULES if "conv" in name
}
COMPLEX_CALLS |= {name: (count, partial(Product, call)) for name, (count, call) in COMPLEX.items()}


def modulus_and_phase(y):
    phases = torch.linspace(0, 3, y.numel(), dtype=torch.float64).view(y.shape)
    return y.abs().square() + (y * torch.polar(torch.ones_like(phases), phases)).real


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature", "ignore:Casting complex")
@pytest.mark.parametrize("first_layer", [False, True])
@pytest.mark.parametrize(("count", "make"), COMPLEX_CALLS.values(), ids=COMPLEX_CALLS)
def test_gradients_of_complex_weights(count, make, first_layer):
    inner = make().to(torch.complex128)
    for parameter in inner.parameters():
        parameter.data += 1j * torch.randn(parameter.shape, dtype=torch.float64)
    x = make_input().detach() * torch.tensor(1 + 0.5j) + 0.2j
    x.requires_grad_(not first_layer)
    module = nn.Sequential(inner, Call(modulus_and_phase))
    expected = plain(module, x)
    mark_all(module)
    backward(module, x)
    found, waiting = backward(module, x)  # adds to what there is, in place
    torch.testing.assert_close(found, twice_as_much(expected))
    assert waiting == count


@pytest.mark.parametrize("make", [partial(nn.Linear, 4, 4), partial(nn.Conv1d, 3, 3, 1)])
def test_a_product_and_a_view_of_it_may_be_written_in_place(make):
    module = nn.Sequential(make(), Call(lambda y: y.div_(2).transpose(1, 2).add_(1))).double()
    x = make_input().detach().reshape(2, 3, 4).requires_grad_()
    expected = plain(module, x)
    found, waiting = backward(mark_all(module), x)
    torch.testing.assert_close(found, expected)
    assert waiting == 1


def test_weights_nobody_marked_do_not_wait():
    _, waiting = backward(nn.Linear(4, 4).double(), make_input())
    assert waiting == 0


@pytest.mark.parametrize(
    ("layer", "shape", "flops"),
    [
        (nn.Linear(4, 3), (6, 4), 2 * 6 * 4 * 3),
        (nn.Conv1d(4, 3, 2), (2, 4, 5), 2 * (2 * 4 * 3) * (4 * 2)),
        (nn.Conv2d(2, 4, 2, groups=2), (1, 2, 3, 3), 2 * (4 * 4) * (1 * 4)),
        (nn.ConvTranspose1d(4, 3, 2), (2, 4, 5), 2 * (2 * 4 * 5) * (3 * 2)),
    ],
    ids=["linear", "conv1d", "grouped conv2d", "transposed conv1d"],
)
def test_flops(layer, shape, flops):
    queue = WeightGradQueue()
    with queue:
        mark_all(layer)(torch.randn(shape)).sin().sum().backward()
    assert queue.flops == flops


@pytest.mark.parametrize(("uses", "dtype"), [(1, None), (2, None), (1, torch.bfloat16)])
def test_hooks_are_called_as_plain_autograd_does(uses, dtype):
    def calls(marked):
        torch.manual_seed(1)
        module, x, seen = nn.Linear(4, 4), torch.randn(6, 4), []
        module.weight.register_hook(lambda grad: seen.append(grad.clone()) or 3 * grad)
        module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        if marked:
            mark_all(module)
        for _ in range(2):
            queue = WeightGradQueue()
            with queue, torch.autocast("cpu", dtype, enabled=dtype is not None):
                y = x
                for _ in range(uses):
                    y = module(y).sin()
            with queue:
                y.pow(2).sum().backward()
            queue.run()
        return seen

    found = calls(marked=True)
    torch.testing.assert_close(found, calls(marked=False))
    assert len(found) == 4


def test_a_weight_changed_in_place_is_an_error():
    module, x = mark_all(nn.Linear(4, 4)), torch.randn(2, 4)
    with WeightGradQueue():
        loss = module(x).sum()
        with torch.no_grad():
            module.weight.add_(1)
        with pytest.raises(RuntimeError, match=r"weight of shape \(4, 4\) was changed in place"):
            loss.backward()


def test_a_checkpoint_recomputes_in_b_up_to_the_last_operations_input(monkeypatch):
    calls, compute = [], Linear.forward
    module, x = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)).double(), make_input()
    expected = plain(module, x)
    monkeypatch.setattr(Linear, "forward", lambda *args: calls.append(args) or compute(*args))
    recomputed = partial(checkpoint, module, use_reentrant=False)
    found, waiting = backward(mark_all(module), x, recomputed)
    torch.testing.assert_close(found, expected)
    assert (waiting, len(calls)) == (2, 3)  # two in F, the first one again in B


@pytest.mark.parametrize("name", ["linear", "x @ w", "addmm", "conv1d", "self attention"])
def test_autocast(name):
    count, make = CALLS[name]
    module, x = make(), torch.randn(6, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(module, x)
        for times in (1, 2):
            found, waiting = backward(mark_all(module), x)
            exact = {n: None if g is None else times * g for n, g in expected.items()}
            torch.testing.assert_close(found, exact, rtol=0, atol=0)
            assert waiting == count


def test_anomaly_detection_sees_a_weights_gradient_too():
    module = mark_all(nn.Linear(4, 4))
    x = torch.full((2, 4), float("inf"), requires_grad=True)  # times no gradient: not a number
    deferred = WeightGradQueue()
    refused = pytest.raises(RuntimeError, match="returned nan values")
    with torch.autograd.detect_anomaly(), deferred, refused:
        module(x).nan_to_num(0).backward(torch.zeros(2, 4))


class Scale(torch.autograd.Function):
    """A kernel of a user, that takes part in the split."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        defer_weight_grad(ctx.weight, lambda: (grad * x).sum(0))
        return grad * ctx.weight, None


@pytest.mark.parametrize(
    ("queue", "count"),
    [(None, 0), (WeightGradQueue(immediate=True), 0), (WeightGradQueue(), 1)],
    ids=["no split", "fused", "split"],
)
@pytest.mark.parametrize("users", [False, True])
def test_gradients_wait_where_b_and_w_are_apart_those_of_users_kernels_too(queue, count, users):
    module = Product(lambda w, b, x: Scale.apply(x, b) if users else x @ w).double()
    x = make_input()
    with nullcontext() if queue is None else queue:
        y = mark_all(module)(x)
        y.pow(2).sum().backward()
    if queue is not None:
        assert len(queue.pending) == count
        queue.run()
    expected = (2 * x * y).sum(0) if users else x.mT @ (2 * y)
    torch.testing.assert_close((module.bias if users else module.weight).grad, expected.detach())


def longest_hold(run):
    """Return the largest share of ``run`` for which no other thread could go on."""
    ticks, done = [time.perf_counter()], threading.Event()

    def tick():
        while not done.wait(1e-3):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    run()
    ticks.append(time.perf_counter())
    done.set()
    thread.join()
    return max(b - a for a, b in zip(ticks, ticks[1:], strict=False)) / (ticks[-1] - ticks[0])


@pytest.mark.slow  # as long as it fails where the operation holds Python
@pytest.mark.parametrize("trains", [True, False])
def test_other_threads_run_python_during_an_operation(trains):
    weight, x = (torch.randn(1100, 1100).requires_grad_() for _ in range(2))
    mark_deferrable(weight, trains)
    with WeightGradQueue():
        y = functional.linear(x, weight)
        passes = (
            lambda: functional.linear(x, weight),
            lambda: torch.autograd.grad(y, x, y, retain_graph=True),
        )
        for run in passes:
            # A busy machine may hold the other thread too, but not each time.
            assert any(longest_hold(run) < 0.5 for _ in range(100))


@pytest.mark.parametrize("name", _KERNELS)
@pytest.mark.parametrize("device", ["CPU", "CUDA"])
def test_the_dispatcher_has_the_same_kernel_where_it_is_sent_to(name, device):
    PATCHES.close()
    plain = torch.library.get_kernel(f"aten::{name}", f"Autograd{device}")
    assert repr(plain) == repr(torch.library.get_kernel(f"aten::{name}", "AutogradOther"))


def test_a_kernel_that_somebody_else_has_put_in_place_is_run():
    PATCHES.close()
    calls = []
    plain = torch.library.get_kernel("aten::mm", "AutogradCPU")

    def count(keys, left, right):
        calls.append(left.shape)
        return plain.call_boxed(keys, left, right)

    others = torch.library.Library("aten", "IMPL")
    others.impl("mm", count, "AutogradCPU", with_keyset=True)
    with deferring_kernels("cpu"):
        torch.mm(torch.ones(2, 3), torch.ones(3, 4))
    others._destroy()
    assert calls == [(2, 3)]


def test_what_is_compiled_after_kernels_were_removed_gets_gradients():
    for _ in range(2):
        linear = nn.Linear(4, 4)
        torch.compile(linear, backend="aot_eager")(torch.randn(2, 4)).sum().backward()
        assert linear.weight.grad is not None
        torch._dynamo.reset()
        PATCHES.close()


def test_a_backward_for_an_inputs_gradient_adds_to_no_weights():
    linear = nn.Linear(4, 4)
    mark_deferrable(linear.weight)
    mark_deferrable(linear.bias)
    x, queue = torch.randn(2, 4, requires_grad=True), WeightGradQueue()
    with queue:
        output = linear(x)
        (found,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
        torch.autograd.backward(output.sum(), inputs=[x], retain_graph=True)
        assert not queue.pending
        output.sum().backward()
    queue.run()
    assert torch.equal(found, linear.weight.sum(0).expand(2, 4))
    assert torch.equal(linear.bias.grad, torch.full((4,), 2.0))


def test_a_cast_to_more_than_the_parameter_has_is_rounded_first():
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    wide = weight.float()
    for value in (1.0, 2**-9):
        add_to_grad(wide, torch.full((4, 4), value))
    expected = torch.ones(4, 4, dtype=torch.bfloat16) + torch.tensor(2**-9, dtype=torch.bfloat16)
    assert torch.equal(weight.grad, expected)


# Gradients of the last W's, regrouped by parameter

LAYERS = "cba"  # in the order of a backward


def add_to(parameter, value):
    def compute():
        parameter.grad = value if parameter.grad is None else parameter.grad + value

    return compute


def test_a_parameter_is_final_before_the_next_one_begins_and_to_the_bit():
    generator = torch.Generator().manual_seed(0)
    values = {n: [torch.randn(5, generator=generator) for _ in range(4)] for n in LAYERS}
    tensors = {name: nn.Parameter(torch.zeros(5)) for name in LAYERS}
    plain = {name: sum(found[1:], found[0]) for name, found in values.items()}
    waiting = [
        [(add_to(tensors[n], values[n][m]), (tensors[n],)) for n in LAYERS] for m in range(4)
    ]
    final = []

    def finish(parameter):
        name = next(n for n, tensor in tensors.items() if tensor is parameter)
        assert torch.equal(parameter.grad, plain[name])
        later = LAYERS[LAYERS.index(name) + 1 :]
        assert all(tensors[other].grad is None for other in later)
        final.append(name)

    regrouped = RegroupedWeightGrads(waiting)
    assert [id(p) for p in regrouped.parameters] == [id(tensors[n]) for n in LAYERS]
    regrouped.run(finish)
    assert final == list(LAYERS)


def test_what_several_layers_use_is_final_with_the_last_of_them():
    tied, own = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    uses = {"head": (tied,), "both": (own, tied.bfloat16()[None]), "own": (own,)}
    ran, final = [], []
    waiting = [
        [(partial(ran.append, (name, m)), weights) for name, weights in uses.items()]
        for m in range(2)
    ]
    regrouped = RegroupedWeightGrads(waiting)
    assert [p is tied for p in regrouped.parameters] == [True, False]
    regrouped.run(lambda p: final.append((p is tied, len(ran))))
    assert ran == [(name, m) for name in uses for m in range(2)]
    assert final == [(True, 4), (False, 6)]


def test_a_queue_says_which_tensors_its_gradients_read():
    bank, other = torch.zeros(4, 4), torch.zeros(4, 4)
    queue = WeightGradQueue()
    assert queue.may_read([other])  # nothing is recorded
    queue.operands = set()
    weight = nn.Parameter(torch.zeros(4, 4))
    queue.defer(Linear(weight, None), bank[:2], None, torch.zeros(2, 4))
    assert queue.may_read([bank])
    assert not queue.may_read([other])
    weight.register_hook(lambda gradient: gradient)  # it may read anything
    assert queue.may_read([other])


def test_products_in_transforms_of_torch_func_have_plain_gradients():
    layer, x = mark_all(nn.Linear(4, 4, dtype=torch.float64)), make_input(False)

    def call(x, layer=layer):
        return torch.func.vmap(torch.func.grad(lambda row: layer(row).pow(2).sum()))(x)

    expected = plain(layer, x, lambda layer, x: call(x, layer))
    found, _ = backward(layer, x, call)
    assert torch.equal(found["weight"], expected["weight"])
