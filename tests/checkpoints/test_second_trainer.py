"""One module with several trainers, pipelines and none, after each other: as on one device."""

import lightning as L
import pytest
import torch
from torch import nn

from tests.support import fits
from tests.support.pairs import slow


class Net(fits.Net):
    """With tables in each block, of which no state dict has the first."""

    def __init__(self, **options):
        super().__init__(dropout=0.0, **options)
        for number, block in enumerate(self.blocks):
            block.register_buffer("scale", torch.tensor(1 + number / 8), persistent=False)
            block.register_buffer("shift", torch.tensor(number, dtype=torch.int16))  # gloo has none
            block.register_forward_hook(_times_scale)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))


def _times_scale(block, args, output):
    return output * block.scale + block.shift / 8


def make_trainer(num_devices, max_epochs=1, **options):
    return fits.trainer(num_devices, options, max_epochs=max_epochs)


def train(num_devices, **options):
    L.seed_everything(7, verbose=False)
    module = Net(**options)
    trainer = make_trainer(num_devices)
    trainer.fit(module, fits.loader(), fits.loader())
    return module, trainer


def look(trainer):
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def use_again(num_devices, folder, others, tie):
    """Return what further trainers find, each of so many devices and of a schedule."""
    module, trainer = train(num_devices, tie=tie)
    path = f"{folder}/{num_devices}.ckpt"
    trainer.save_checkpoint(path)
    found = []
    for devices, schedule in others:
        for ckpt_path in (path, None):
            trainer = make_trainer(devices, schedule=schedule)
            trainer.test(module, fits.loader(), ckpt_path=ckpt_path, verbose=False)
            found.append(look(trainer))
    trainer = make_trainer(others[-1][0], 2, schedule=others[-1][1])
    trainer.fit(module, fits.loader(), fits.loader(), ckpt_path=path)
    return found, look(trainer)


@pytest.mark.parametrize(
    ("num_ranks", "others", "tie"),
    [(2, [(0, None), (2, "zb_v"), (0, None)], True), slow((3, [(0, None), (3, "zb_v")], False))],
)
def test_a_checkpoint_brings_a_module_to_any_other_trainer(ranks, tmp_path, num_ranks, others, tie):
    expected, end = use_again(0, tmp_path, [(0, None)], tie)
    for found, last in ranks(num_ranks).run(use_again, num_ranks, str(tmp_path), others, tie):
        assert found == [pytest.approx(expected[0], rel=1e-9)] * (2 * len(others))
        assert last == pytest.approx(end, rel=1e-9)


def load_by_hand(num_devices, folder):
    """Return whether a state dict fills the module, and parts of it, with its own values."""
    module, trainer = train(num_devices)
    trainer.save_checkpoint(f"{folder}/fit.ckpt")
    state = torch.load(f"{folder}/fit.ckpt", weights_only=False)["state_dict"]
    block = {k.removeprefix("blocks.0."): v for k, v in state.items() if k[:9] == "blocks.0."}
    module.blocks[0].load_state_dict(block)
    module.blocks[0](torch.zeros(1, 16).double())
    module.load_state_dict(state)
    again = module.state_dict()
    hooks = [hook for part in module.modules() for hook in part._forward_pre_hooks]
    return all(torch.equal(again[name], state[name]) for name in state), hooks


def test_a_plain_load_fills_what_lives_elsewhere(ranks, tmp_path):
    assert ranks(2).run(load_by_hand, 2, str(tmp_path)) == [(True, [])] * 2


def use_without_values(num_devices):
    module, _ = train(num_devices)
    with pytest.raises(RuntimeError) as refusal:
        make_trainer(0).test(module, fits.loader(), verbose=False)
    return str(refusal.value)


def test_without_its_checkpoint_a_module_in_parts_is_refused(ranks):
    for refusal in ranks(2).run(use_without_values, 2):
        assert "of Net are on other ranks since it was trained over a pipeline" in refusal
        assert "load its checkpoint (ckpt_path=..., or load_state_dict)" in refusal


def go_on(num_devices):
    module, _ = train(num_devices)
    trainer = make_trainer(num_devices, schedule="zb_v" if num_devices else None)
    trainer.test(module, fits.loader(), verbose=False)
    return look(trainer)


def test_a_second_pipeline_brings_together_what_the_first_has_left(ranks):
    assert ranks(2).run(go_on, 2) == [pytest.approx(go_on(0), rel=1e-9)] * 2


class MadeAnew(fits.Net):
    """Its configure_model makes the blocks in each run, which one of a trainer need not be."""

    def configure_model(self):
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(fits.Net(dropout=0.0).blocks)


def _give_other_layers(num_devices, folder):
    """Return how a resumed fit that was finished and one with another block and head end."""
    path, found = f"{folder}/{num_devices}.ckpt", []
    for change in (False, True):
        L.seed_everything(7, verbose=False)
        module = fits.Net(dropout=0.0) if change else MadeAnew(dropout=0.0)
        trainer = make_trainer(num_devices)
        trainer.fit(module, fits.loader())
        trainer.save_checkpoint(path)
        if change:
            L.seed_everything(8, verbose=False)
            other = fits.Net(dropout=0.0)
            module.blocks[1], module.norm = other.blocks[1], other.norm
            trainer.fit_loop.max_epochs = 2
        trainer.fit(module, fits.loader(), ckpt_path=None if change else path)
        trainer.save_checkpoint(path)
        found.append({k: v.tolist() for k, v in torch.load(path)["state_dict"].items()})
    return found


@pytest.mark.parametrize("num_ranks", [1, slow(2)])
def test_layers_that_are_made_anew_between_two_fits_are_trained(ranks, tmp_path, num_ranks):
    wanted = ranks(1).run(_give_other_layers, 0, tmp_path)[0]
    found = ranks(num_ranks).run(_give_other_layers, num_ranks, tmp_path)[0]
    for one, other in zip(wanted, found, strict=True):
        for name, value in one.items():
            torch.testing.assert_close(
                torch.tensor(other[name]), torch.tensor(value), rtol=1e-4, atol=1e-5
            )
