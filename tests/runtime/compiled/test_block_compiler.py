"""How blocks may be compiled, and what is refused."""

import pytest
import torch
from torch import nn

from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.runtime.compiled.block_compiler import (
    BlockCompiler,
    check_compiled_parts,
    compiled_call,
)
from tests.support.pairs import slow


@pytest.mark.parametrize("compile", [False, True, {}, {"backend": "aot_eager", "dynamic": True}])
def test_what_torch_knows_is_accepted(compile):
    assert PipelineSettings(compile=compile).compile == compile


@pytest.mark.parametrize(
    ("compile", "message"),
    [
        ("inductor", "compile must be True, False or the arguments of torch.compile"),
        (None, "compile must be True, False or"),
        ({"speed": "high"}, "is refused by torch.compile: .*speed"),
        ({"mode": "reduce-overhead"}, "CUDA graphs, which own their outputs"),
        ({"mode": "max-autotune"}, 'use mode="max-autotune-no-cudagraphs"'),
        slow(({"options": {"triton.cudagraphs": True}}, "CUDA graphs")),
        ({"backend": "cudagraphs"}, "CUDA graphs"),
    ],
)
def test_what_cannot_be_is_refused(compile, message):
    with pytest.raises(ValueError, match=message):
        PipelineSettings(compile=compile)


@pytest.mark.parametrize("wrap", [False, True])
def test_parts_that_their_owner_has_compiled_with_cuda_graphs_are_refused(wrap):
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    if wrap:
        module[1] = torch.compile(module[1], mode="reduce-overhead")
    else:
        module[1].compile(mode="reduce-overhead")
    with pytest.raises(ValueError, match="^1 is compiled with CUDA graphs"):
        check_compiled_parts(module)


def test_blocks_are_given_back_as_they_were():
    blocks = [nn.Linear(1, 1), nn.Linear(1, 1), torch.compile(nn.Linear(1, 1), backend="eager")]
    blocks[0].compile(backend="eager")
    before = [compiled_call(block) for block in blocks]
    compiler = BlockCompiler(nn.Sequential(*blocks), blocks, True)
    compiler.compile()
    assert compiled_call(blocks[0]) is before[0]
    assert compiled_call(blocks[1]) is not None
    assert blocks[2]._compiled_call_impl is None
    compiler.leave()
    assert [compiled_call(block) for block in blocks] == before
