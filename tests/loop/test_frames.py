"""How deep the package's own calls go around the user's: a traceback that she can read."""

import sys
from pathlib import Path

import pytest

import lightning_pipeoffload
from tests.support import fits

PACKAGE = str(Path(lightning_pipeoffload.__file__).parent)


def own_frames(until):
    """Return the package's functions that the caller's caller runs in, up to one of that name."""
    frame, found = sys._getframe(2), []
    while frame is not None and frame.f_code.co_name != until:
        if frame.f_code.co_filename.startswith(PACKAGE):
            found.append(frame.f_code.co_name)
        frame = frame.f_back
    return found


class Deep(fits.Net):
    """Notes the frames around its step and around its first block."""

    def __init__(self):
        super().__init__(depth=4)
        self.around_step = self.around_block = ()
        block = self.blocks[0]
        plain = block.forward

        def forward(*args):
            self.around_block = own_frames("training_step")
            return plain(*args)

        block.forward = forward

    def training_step(self, batch, batch_idx):
        self.around_step = own_frames("_call_strategy_hook")
        return super().training_step(batch, batch_idx)


def fit(size):
    module = Deep()
    fits.trainer(size, max_steps=3).fit(module, fits.loader())
    return module.around_step, module.around_block


@pytest.mark.parametrize("size", [1, 2])
def test_few_frames_are_around_a_step_and_a_block(ranks, size):
    around_step, around_block = ranks(size).run(fit, size)[0]
    assert 0 < len(around_step) <= 8, around_step
    if size == 1:  # elsewhere the block runs on another rank
        assert 0 < len(around_block) <= 3, around_block
