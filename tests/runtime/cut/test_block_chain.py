import copy
import io
import pickle

import pytest
import torch
from torch import nn

from lightning_pipeoffload.runtime.cut.block_chain import find_chain
from tests.support.small_modules import MODELS, Regression, linear_blocks

NAMES = {
    "gpt": "gpt.blocks",
    "mlp": "net",
    "llama": "model.model.layers",
    "gpt2": "model.transformer.h",
}


@pytest.mark.parametrize(("model", "name"), NAMES.items())
def test_the_chain_is_found(model, name):
    assert find_chain(MODELS[model].make()).name == name


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(linear_blocks(3))
        self.decoder = nn.ModuleList(linear_blocks(3))
        self.single = nn.Sequential(nn.Linear(50, 50))


class Outer(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net


def compiled_in_place():
    net = Regression(linear_blocks(2))
    net.compile(backend="eager")
    return net


PATTERNS = {
    "decoder": ["decoder.0", "decoder.1", "decoder.2"],
    ("encoder.*", "decoder.*"): [
        f"{name}.{i}" for name in ("encoder", "decoder") for i in range(3)
    ],
    ("decoder.1", "encoder.*"): ["decoder.1", "encoder.0", "encoder.1", "encoder.2"],
    ("*coder",): ["encoder", "decoder"],
}


@pytest.mark.parametrize(("blocks", "names"), PATTERNS.items())
def test_the_chain_may_be_named(blocks, names):
    chain = find_chain(Two(), blocks)
    assert [chain.block_name(index) for index in range(len(chain))] == names
    assert chain.index_of(f"{names[1]}.weight") == 1
    assert chain.index_of("single.0.weight") is None


def test_nested_and_compiled_blocks_are_a_chain():
    nested = [nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(3)]
    assert find_chain(nn.Sequential(nn.Sequential(*nested))).name == "0"
    compiled = [torch.compile(block) for block in linear_blocks(2)]
    assert find_chain(Regression(compiled)).name == "blocks"


NO_CHAIN = (
    "found no ModuleList or Sequential of blocks with parameters in {}; a pipeline is cut between "
    "its entries, so keep the model's layers in one and call them once each and in order"
)
COMPILED = (
    "net is compiled as a whole and contains the blocks {}; a stage runs only its own blocks, so "
    "compile the blocks instead, block.compile() for each"
)
REFUSED = [
    (Two, None, 'encoder and decoder could both be the chain of blocks; say which with blocks="en'),
    (Two, "encodr", "blocks='encodr' is not .* encoder, decoder, single"),
    (Two, "encodr", "did you mean 'encoder'"),
    (Two, "encoder.0", "blocks='encoder.0' is not .* encoder, decoder, single"),
    (Two, "", "blocks='' is not .* encoder, decoder, single"),
    (Two, ("encoder.*", "decodr.*"), "no module is called 'decodr.*'; .* there are encoder, decod"),
    (Two, ("encoder", "encoder.*"), "finds encoder.0 inside of encoder; each has to be a block of"),
    (lambda: nn.Linear(2, 2), None, NO_CHAIN.format("Linear")),
    (lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()), None, NO_CHAIN.format("Sequential")),
    (
        lambda: Outer(torch.compile(Regression(linear_blocks(2)))),
        None,
        COMPILED.format("net._orig_mod.blocks"),
    ),
    (lambda: Outer(compiled_in_place()), None, COMPILED.format("net.blocks")),
]


@pytest.mark.parametrize(("make", "blocks", "message"), REFUSED)
def test_what_is_no_chain_is_refused(make, blocks, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        find_chain(make(), blocks)


def by_torch_save(block):
    file = io.BytesIO()
    torch.save(block, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def by_pickle(block):
    return pickle.loads(pickle.dumps(block))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, by_torch_save, by_pickle])
def test_a_copy_of_an_intercepted_block_is_plain(duplicate):
    chain = find_chain(Regression(linear_blocks(3)))
    before = repr(chain.blocks[0])
    chain.intercept()
    assert repr(chain.blocks[0]) == before
    found = duplicate(chain.blocks[0])
    assert type(found) is nn.Linear
    torch.testing.assert_close(found.state_dict(), chain.blocks[0].state_dict())
