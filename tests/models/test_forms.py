"""Forms that models come in, each as a small module over four ranks and eight blocks.

With ``zb_h1`` only, which takes B and W apart: the schedules are tried with each family.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.comparison import assert_trains_exactly, train, train_plain
from tests.support.families import Task
from tests.support.small_modules import Outcome, assert_same

WIDTH = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """An embedding, eight blocks and a head that may be the embedding's weight."""

    def __init__(self, block=Block, tied=False):
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(8))
        self.head = nn.Linear(WIDTH, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Complex(Block):
    """Hands on what is to be read conjugated."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.complex128)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128))

    def forward(self, x):
        y = self.linear(x)
        y = torch.complex(y.real.tanh(), y.imag.sin())
        return (x + torch.einsum("bi,oi->bo", y.conj(), self.weight)).conj()


class ComplexNet(Net):
    def __init__(self, tied):
        super().__init__(Complex)
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.complex128)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.complex128)
        if tied:
            self.head.weight = self.embed.weight


def modulus(model, batch):
    conjugate = model.embed(batch).conj()
    return (model(batch) + conjugate).abs().mean() + conjugate.imag.sin().mean()


def loss(model, batch):
    return functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def tokens(length=5, count=8):
    return torch.randint(8, (count, length))


class Product(Block):
    """A frozen weight, to which the product of two small ones is added."""

    def __init__(self):
        super().__init__()
        self.linear.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 1, bias=False)
        self.up = nn.Linear(1, WIDTH, bias=False)

    def forward(self, x):
        weight = self.linear.weight + self.up.weight @ self.down.weight
        return x + functional.linear(x, weight, self.linear.bias)


class Hooked(Block):
    def __init__(self):
        super().__init__()
        self.linear.register_forward_hook(lambda module, inputs, output: 2 * output)


class Binary(Block):
    """Computes with the signs of its weight, which it gives it for a while."""

    def forward(self, x):
        weight = self.linear.weight
        own, weight.data = weight.data, 0.1 * weight.data.sign()
        x = super().forward(x)
        weight.data = own
        return x


def scaled_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # torch reads types
    return 2 * x @ weight


def differentiate(ctx, grad):
    x, weight = ctx.saved_tensors
    return 2 * grad @ weight.t(), 2 * x.flatten(0, 1).t() @ grad.flatten(0, 1)


def custom_operation(name):
    """Define an operation of which torch knows nothing, not even the shape."""
    operation = torch.library.custom_op(f"pipeoffload_tests::{name}", mutates_args=())(
        scaled_product
    )
    operation.register_autograd(
        differentiate, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )
    return operation


class Unknown(Block):
    """Its weight is in an operation that no kernel of ours knows, nor torch the shape of."""

    operation = custom_operation("unknown_shape")

    def forward(self, x):
        return x + self.operation(x, self.linear.weight)


FORMS = {
    "product_of_adapters": lambda: Net(Product),
    "forward_hook": lambda: Net(Hooked),
    "binary_weights": lambda: Net(Binary),
    "unknown_operation": lambda: Net(Unknown),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_form_trains_exactly(form):
    assert_trains_exactly(Task(FORMS[form](), loss).double(), tokens())


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "tied"), [("1f1b", 1, False), ("zb_h1", 3, True), ("zb_v", 2, False)]
)
def test_complex_weights(schedule, num_ranks, tied):
    batch = torch.randn(8, WIDTH, dtype=torch.complex128)
    assert_trains_exactly(Task(ComplexNet(tied), modulus), batch, schedule, num_ranks)


def test_autocast_in_the_step():
    def step(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch)

    module, batch = Task(Net(), step), tokens()
    _, found = train(module, "zb_h1", 4, batch)
    assert_same(found, train_plain(module, batch), tolerance=1e-6)


def test_lengths_and_sizes_change_from_batch_to_batch():
    module = Task(Net(), loss).double()
    pipeline, _ = train(module, "zb_h1", 4, tokens())
    for length, size in ((3, 2), (7, 3), (5, 2)):
        assert_goes_on_exactly(pipeline, module, tokens(length, 4 * size), size)


def test_a_number_in_the_batch_decides_shapes():
    def step(model, batch):
        return loss(model, batch["x"][:, : batch["length"]])

    module = Task(Net(), step).double()
    pipeline, _ = train(module, "zb_h1", 4, {"x": tokens(), "length": 5})
    assert_goes_on_exactly(pipeline, module, {"x": tokens(), "length": 3})


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_run_once_per_microbatch(kind):
    calls = []
    module = Task(Net(), loss).double()
    pipeline, _ = train(module, "zb_h1", 2, tokens())
    for rank in pipeline.ranks:
        for parameter in rank.module.parameters():
            getattr(parameter, kind)(lambda _: calls.append(1) or None)
    pipeline.run(tokens(), 2)
    assert len(calls) == 4 * len(list(module.parameters()))


@pytest.mark.parametrize(
    ("kind", "schedule", "num_ranks"),
    [("register_hook", "zb_h1", 3), ("register_post_accumulate_grad_hook", "zb_v", 1)],
)
def test_a_hook_on_a_weight_of_several_stages_is_refused(schedule, num_ranks, kind):
    module = Task(Net(tied=True), loss).double()
    pipeline, _ = train(module, schedule, num_ranks, tokens())  # without one
    for rank in pipeline.ranks:
        getattr(rank.module.model.embed.weight, kind)(lambda _: None)
    message = "on model.embed.weight = model.head.weight, .* stages 0 and . use: .* only its part"
    with pytest.raises(ValueError, match=message):
        pipeline.run(tokens(), 2)


def test_a_hook_on_a_tied_weight_of_one_stage_sees_the_sum():
    module, batch = Task(Net(tied=True), loss).double(), tokens()
    pipeline, _ = train(module, "zb_h1", 1, batch)
    model = pipeline.ranks[0].module.model
    model.zero_grad()
    for weight in (model.embed.weight, module.model.embed.weight):
        weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    pipeline.run(batch, 2)
    for part in batch.split(2):
        (loss(module.model, part) / 4).backward()
    torch.testing.assert_close(model.embed.weight.grad, module.model.embed.weight.grad)


def assert_goes_on_exactly(pipeline, module, batch, size=2):
    """Compare one more step of ``pipeline`` with the module's."""
    for rank in pipeline.ranks:
        rank.module.zero_grad()
    losses = pipeline.run(batch, size)
    assert_same(Outcome(losses, pipeline.named_gradients()), train_plain(module, batch, size))


@pytest.mark.parametrize(("schedule", "tied"), [("zb_h1", True), ("interleaved_1f1b", False)])
def test_parameters_freeze_and_thaw_while_training(schedule, tied):
    module = Task(Net(tied=tied), loss).double()
    pipeline, _ = train(module, schedule, 2, tokens())
    for frozen in (["embed", "blocks.0", "blocks.1"], ["blocks.5", "head"], []):
        for rank in [*pipeline.ranks, None]:
            model = rank.module.model if rank else module.model
            model.requires_grad_(True)
            for name in frozen:
                model.get_submodule(name).requires_grad_(False)
        assert_goes_on_exactly(pipeline, module, tokens())


def test_freezing_inside_a_step_says_what_to_do():
    is_late = []

    def freezing(net, batch):
        if is_late:
            net.requires_grad_(False)
        return loss(net, batch)

    pipeline, _ = train(Task(Net(), freezing), "zb_h1", 2, tokens())
    is_late.append(True)
    with pytest.raises(RuntimeError, match="freeze or unfreeze parameters in hooks, alike on all"):
        pipeline.run(tokens(), 2)
