"""A module made in parts has the plain module's weights to the bit, and draws what it draws."""

import copy
import random
import re

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_pipeoffload.runtime.making import (
    PartedModule,
    constructing_local_stages,
    make_blueprint,
)
from lightning_pipeoffload.runtime.shapes import RemoteTensor
from lightning_pipeoffload.runtime.users_code import find_slots
from lightning_pipeoffload.schedule import build
from tests.support.small_modules import MODELS


class Later(L.LightningModule):
    """Makes its model in ``configure_model``, once."""

    def __init__(self, make):
        super().__init__()
        self.make = make
        self.model = None

    def configure_model(self):
        if self.model is None:
            self.model = self.make()


def stage_ranks_of(schedule, num_ranks):
    plan = build(schedule, num_ranks, 2 * num_ranks)
    return [plan.rank_of(stage) for stage in range(plan.num_stages)]


def generators():
    """Return where the global generators are."""
    state = np.random.get_state(legacy=False)
    return [torch.get_rng_state().tolist(), repr(state), random.getstate()]


def make_part(make, stage_ranks, rank):
    """Make one rank's part."""
    L.seed_everything(5, verbose=False)
    module = Later(make)
    blueprint = make_blueprint(module, module.configure_model, stage_ranks)
    assert blueprint is not None
    local = [stage for stage, owner in enumerate(stage_ranks) if owner == rank]
    with constructing_local_stages(
        module, blueprint, local, [f"stage {s}" for s in range(len(stage_ranks))]
    ):
        module.configure_model()
    return module, blueprint


def assert_made_alike(make, stage_ranks=(0, 1, 2)):
    """Compare every rank's part with the plain module, to the bit, and the generators after it."""
    L.seed_everything(5, verbose=False)
    plain = Later(make)
    plain.configure_model()
    after = generators()
    expected = {slot.name: slot.tensor for slot in find_slots(plain)}
    found = set()
    for rank in range(max(stage_ranks) + 1):
        module, _ = make_part(make, stage_ranks, rank)
        assert generators() == after
        tensors = {slot.name: slot.tensor for slot in find_slots(module)}
        assert _aliases(tensors) == _aliases(expected)
        for name, tensor in tensors.items():
            _compare(name, tensor, expected[name])
        found |= {name for name, t in tensors.items() if not isinstance(t, RemoteTensor)}
    assert found == {*expected}


def _aliases(tensors):
    return {name: [n for n in tensors if tensors[n] is t] for name, t in tensors.items()}


def _compare(name, found, expected):
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
    assert found.requires_grad == expected.requires_grad, name
    if not isinstance(found, RemoteTensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "num_ranks", "schedule"),
    [
        ("gpt", 4, "1f1b"),
        ("gpt_tied", 2, "zb_v"),
        ("llama", 4, "zb_v"),
        ("llama_tied", 1, "zb_v"),
        ("gpt2", 4, "1f1b"),
    ],
)
def test_families_are_the_plain_modules(name, num_ranks, schedule):
    assert_made_alike(MODELS[name].make, stage_ranks_of(schedule, num_ranks))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.drawn = nn.Parameter(torch.randn(width, width))
        self.register_buffer("table", torch.randn(3))


class Net(nn.Module):
    def __init__(self, change=None, width=8):
        super().__init__()
        self.embed = nn.Embedding(17, width, padding_idx=0)
        self.layers = nn.ModuleList(Block(width) for _ in range(6))
        self.head = nn.Linear(width, 17)
        if change is not None:
            change(self)


def matrices(net):
    return [p for p in net.parameters() if p.dim() > 1]


def initialize(net):
    for depth, layer in enumerate(net.layers):
        nn.init.orthogonal_(layer.linear.weight)
        nn.init.trunc_normal_(layer.drawn, std=0.5 / (depth + 1), a=-0.4, b=0.4)
    nn.init.sparse_(net.head.weight, 0.3)
    net.head.bias.data.exponential_()


def draw_elsewhere(net):
    for p in net.parameters():
        p.data = torch.from_numpy(np.random.randn(*p.shape)).float() * random.random()


def add_to_values(net):
    for p in net.parameters():
        p.data += torch.randn_like(p)
        p.data.div_(p.data.norm() + 1)


def copy_values(net):
    net.layers[4].drawn.data[:, :4] = net.layers[4].linear.weight.data[:, 4:]
    net.layers[5].linear.weight.data.copy_(net.layers[5].drawn.data)


def copy_to_the_head(net):
    net.head.weight.data.copy_(net.embed.weight.data)


def load_from_a_layer(net):
    net.layers[5].linear.load_state_dict(net.layers[1].linear.state_dict())


def keep_values(net):
    net.register_buffer("scale", net.layers[3].linear.weight.std())


def copy_modules(net):
    net.layers[2].target = copy.deepcopy(net.layers[2].linear).requires_grad_(False)
    net.layers[2].other = nn.Parameter(net.layers[2].drawn.detach().clone())


def normalize(net):
    for layer in net.layers:
        layer.linear = nn.utils.parametrizations.weight_norm(layer.linear)


def share_values(net):
    weight = nn.Parameter(torch.randn(8, 8))
    net.first, net.second = weight, weight
    nn.init.normal_(weight)
    for layer in net.layers[1:]:
        layer.drawn = net.layers[0].drawn


def convert(net):
    net.double()
    net.layers[1].to(torch.bfloat16)
    net.embed.requires_grad_(False)


def exchange(net):
    del net.layers[-1]
    net.layers.append(Block(8))
    net.layers = nn.ModuleList(reversed(net.layers))


def seed_inside(net):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        nn.init.normal_(net.head.weight)
    nn.init.normal_(net.embed.weight, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    "change",
    [
        *(initialize, draw_elsewhere, add_to_values, copy_values, keep_values, copy_modules),
        *(normalize, share_values, convert, exchange, seed_inside),
    ],
)
def test_whatever_gives_values_gives_the_same(change):
    assert_made_alike(lambda: Net(change))


def clones():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, norm_first=True), 6)


def materialized():
    with torch.device("meta"):
        net = Net()
    net.to_empty(device="cpu")
    for part in net.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
        elif isinstance(part, Block):
            nn.init.normal_(part.drawn)
            part.table.zero_()
    return net


def in_bfloat16():
    torch.set_default_dtype(torch.bfloat16)
    try:
        return Net(add_to_values)
    finally:
        torch.set_default_dtype(torch.float32)


def drawn_in_pieces():
    # More than two pieces of 2**20 numbers, and no multiple of 16.
    blocks = [nn.Linear(5, 5) for _ in range(3)]
    blocks[0].large = nn.Parameter(nn.init.uniform_(torch.empty(3)))
    blocks[0].large = nn.Parameter(torch.empty(2**21 + 2**20 + 7))
    nn.init.normal_(blocks[0].large)
    nn.init.uniform_(blocks[0].large)
    return nn.Sequential(*blocks)


def by_a_users_generator():
    generator = torch.Generator().manual_seed(3)
    return Net(lambda net: [nn.init.normal_(p, generator=generator) for p in matrices(net)])


@pytest.mark.parametrize(
    "make", [clones, materialized, in_bfloat16, drawn_in_pieces, by_a_users_generator]
)
def test_whatever_makes_modules_makes_the_same(make):
    assert_made_alike(make)


def test_a_rank_has_its_part():
    module, blueprint = make_part(lambda: Net(copy_values), [0, 1, 2], rank=1)
    real = {s.name for s in find_slots(module) if not isinstance(s.tensor, RemoteTensor)}
    assert blueprint.counts == [2, 3, 1]
    assert {name.split(".")[2] for name in real if "linear" in name} == {"2", "3", "4"}
    assert sum("table" in name for name in real) == 6


@pytest.mark.parametrize(
    ("change", "source"),
    [(copy_to_the_head, "weight of Embedding"), (load_from_a_layer, "(weight|bias) of Linear")],
)
def test_a_weight_that_is_made_from_one_of_another_rank_is_refused(change, source):
    refused = pytest.raises(ValueError, match=f"copy_.*{source}, which another rank makes")
    with refused as found:
        make_part(lambda: Net(change), [0, 1, 2], rank=2)
    assert "make that part in __init__, or give it a value of its own" in str(found.value)


class FromPretrained(nn.Module):
    @classmethod
    def from_pretrained(cls):
        return Net()


def test_from_pretrained_is_refused():
    with pytest.raises(ValueError, match=r"load_weights\(self, path\)") as refusal:
        make_part(FromPretrained.from_pretrained, [0, 1], rank=0)
    assert "return FromPretrained" not in str(refusal.value)
    assert __file__ in str(refusal.value)


def test_what_depends_on_a_clock_is_refused():
    made = []

    def make():
        made.append(1)
        return Net(width=7 + len(made))

    with pytest.raises(ValueError, match="made different parameters: weight of Embedding"):
        make_part(make, [0, 1], rank=0)


def test_what_reads_values_is_made_whole(caplog):
    module = Later(lambda: Net(lambda net: net.head.weight.data.mul_(float(net.head.weight.std()))))
    assert make_blueprint(module, module.configure_model, [0, 1]) is None
    assert re.search("reads a value: .* computed from weight of Linear .*test_constr", caplog.text)
    assert module.model is None


def test_what_makes_no_parameters_is_left_alone():
    module = Later(Net)
    module.configure_model()
    before = {slot.name: slot.tensor for slot in find_slots(module)}
    assert make_blueprint(module, module.configure_model, [0, 1]) is None
    assert all(slot.tensor is before[slot.name] for slot in find_slots(module))


class Skipping(TorchFunctionMode):
    """Leaves torch's own initialization out, as ``trainer.init_module(empty_init=True)`` does."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__module__", "") == "torch.nn.init":
            return (kwargs or {}).get("tensor", args[0] if args else None)
        return func(*args, **(kwargs or {}))


def without_values(fill=None):
    def make():
        with Skipping():
            net = Net()
        if fill is not None:
            with torch.no_grad():
                fill(net)
        return net

    return make


def emptied(net):
    net.to_empty(device="cpu")
    net.double()


def check_filled(make, rank=0):
    module, blueprint = make_part(make, [0, 1], rank)
    parts = PartedModule(module, blueprint, [0, 1], rank, fetch=lambda tensor, rank: tensor)
    parts.check_filled()


def test_what_nothing_fills_is_refused_with_its_name():
    for make in (without_values(), lambda: Net(emptied), lambda: Net(convert_emptied)):
        with pytest.raises(RuntimeError, match=r"^nothing has filled model\.(emb|lay).* more"):
            check_filled(make)
    with pytest.raises(RuntimeError, match=r"layers\.4\.linear\.bias, .* and 3 more since"):
        check_filled(without_values(), rank=1)
    check_filled(without_values(lambda net: [p.zero_() for p in net.parameters()]))
    check_filled(without_values(lambda net: [p.data.uniform_() for p in net.parameters()]))


def convert_emptied(net):
    net.to_empty(device="cpu").to(torch.bfloat16)
