import copy
import io
import pickle
import re

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


def test_nested_blocks_do_not_hide_the_chain():
    blocks = [nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(3)]
    assert find_chain(nn.Sequential(nn.Sequential(*blocks))).name == "0"


def test_two_equal_chains_are_refused():
    message = (
        'encoder and decoder could both be the chain of blocks; say which with blocks="encoder"'
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        find_chain(Two())


def test_the_chain_may_be_named():
    assert find_chain(Two(), "decoder").name == "decoder"


@pytest.mark.parametrize("name", ["encodr", "encoder.0", ""])
def test_a_wrong_name_is_refused(name):
    with pytest.raises(ValueError, match=f"blocks='{name}' is not .* encoder, decoder, single"):
        find_chain(Two(), name)
    with pytest.raises(ValueError, match="did you mean 'encoder'"):
        find_chain(Two(), "encodr")


PATTERNS = {
    ("encoder.*", "decoder.*"): ["encoder.0", "encoder.1", "encoder.2", "decoder.0", "decoder.1"],
    ("decoder.1", "encoder.*"): ["decoder.1", "encoder.0", "encoder.1", "encoder.2"],
    ("*coder",): ["encoder", "decoder"],
}


@pytest.mark.parametrize(("patterns", "names"), PATTERNS.items())
def test_patterns_name_blocks_in_their_order(patterns, names):
    chain = find_chain(Two(), patterns)
    assert [chain.block_name(index) for index in range(len(chain))][: len(names)] == names
    assert chain.index_of(f"{names[1]}.weight") == 1
    assert chain.index_of("single.0.weight") is None


WRONG_PATTERNS = {
    ("encoder.*", "decodr.*"): "no module is called 'decodr.*'; .* there are encoder, decoder, sin",
    ("encoder", "encoder.*"): "finds encoder.0 inside of encoder; each has to be a block of its",
}


@pytest.mark.parametrize(("patterns", "message"), WRONG_PATTERNS.items())
def test_wrong_patterns_are_refused(patterns, message):
    with pytest.raises(ValueError, match=message):
        find_chain(Two(), patterns)


@pytest.mark.parametrize("module", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU())])
def test_a_module_without_a_chain_is_refused(module):
    message = (
        f"found no ModuleList or Sequential of blocks with parameters in {type(module).__name__}; "
        f"a pipeline is cut between its entries, so keep the model's layers in one and call them "
        f"once each and in order"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        find_chain(module)


class Recording:
    """A pass that notes the calls."""

    def __init__(self):
        self.calls = []

    def call_block(self, index, call, arguments):
        self.calls.append((index, arguments[1]))
        return call()


class Outer(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net


def compiled_in_place():
    net = Regression(linear_blocks(2))
    net.compile(backend="eager")
    return net


@pytest.mark.parametrize(
    ("make", "blocks"),
    [
        (lambda: torch.compile(Regression(linear_blocks(2))), "net._orig_mod.blocks"),
        (compiled_in_place, "net.blocks"),
    ],
)
def test_a_compiled_module_around_the_blocks_is_refused(make, blocks):
    message = (
        f"net is compiled as a whole and contains the blocks {blocks}; a stage runs only its own "
        f"blocks, so compile the blocks instead, block.compile() for each"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        find_chain(Outer(make()))


def test_compiled_blocks_are_a_chain():
    blocks = [torch.compile(block) for block in linear_blocks(2)]
    assert find_chain(Regression(blocks)).name == "blocks"


def test_blocks_of_one_class_stay_of_one_class(chain):
    chain.intercept()
    assert len({type(block) for block in chain.blocks}) == 1


@pytest.fixture
def chain():
    return find_chain(Regression(linear_blocks(3)))


def call_all(chain):
    for block in chain.blocks:
        block(input=torch.ones(1, 4))


def test_a_pass_sees_the_calls(chain):
    recording = Recording()
    chain.intercept()
    with chain.running(recording):
        call_all(chain)
    call_all(chain)
    assert [index for index, _ in recording.calls] == [0, 1, 2]
    assert list(recording.calls[0][1]) == ["input"]


def test_released_blocks_have_their_own_class(chain):
    chain.intercept()
    chain.intercept()
    assert all(type(block) is not nn.Linear for block in chain.blocks)
    chain.release()
    chain.release()
    assert all(type(block) is nn.Linear for block in chain.blocks)


def test_an_intercepted_block_looks_as_before(chain):
    before = repr(chain.blocks[0])
    chain.intercept()
    assert isinstance(chain.blocks[0], nn.Linear)
    assert repr(chain.blocks[0]) == before


def by_torch_save(block):
    file = io.BytesIO()
    torch.save(block, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, by_torch_save])
def test_a_copy_of_an_intercepted_block_is_plain(chain, duplicate):
    chain.intercept()
    found = duplicate(chain.blocks[0])
    assert type(found) is nn.Linear
    torch.testing.assert_close(found.state_dict(), chain.blocks[0].state_dict())


def test_an_intercepted_block_can_be_pickled(chain):
    chain.intercept()
    assert type(pickle.loads(pickle.dumps(chain.blocks[0]))) is nn.Linear
