"""16-mixed: scale, skipped steps and weights as on one device, whichever stage overflows."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_pipeoffload.runtime.batch import batch_size
from tests.support import fits
from tests.support.pairs import slow
from tests.support.small_modules import split_batch

START, NUM_BATCHES = 2.0**14, 5


class Net(fits.Net):
    """Its first block overflows in the second batch, and in that stage only."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.float()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_after_backward(self):
        weight = self.blocks[0].linear.weight
        if self.trainer.global_step == 1 and weight.grad is not None:
            weight.grad.mul_(float("inf"))


class Scales(L.Callback):
    """Keeps the loss scale after each batch."""

    def __init__(self):
        self.scales = []

    def on_train_batch_end(self, trainer, *args):
        self.scales.append(trainer.precision_plugin.scaler.get_scale())


def make_scaler():
    return torch.amp.GradScaler("cpu", init_scale=START, growth_interval=2)


def fit(num_devices, folder, schedule, ckpt_path=None, **options):
    L.seed_everything(7, verbose=False)
    module, scales = Net(), Scales()
    plugin = MixedPrecision("16-mixed", "cpu", make_scaler())
    trainer = fits.trainer(
        num_devices,
        {"schedule": schedule},
        **options,
        plugins=[plugin],
        max_epochs=1,
        callbacks=[scales, ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)],
        gradient_clip_val=0.5,
        limit_val_batches=0,
        enable_checkpointing=True,
    )
    trainer.fit(module, fits.loader(), ckpt_path=ckpt_path)
    trainer.save_checkpoint(f"{folder}/end.ckpt")
    return scales.scales, "_unscale_grads_" in vars(plugin.scaler)


def train_plain():
    """Train by hand over the same microbatches, with torch's own scaler."""
    L.seed_everything(7, verbose=False)
    module, scaler = Net(), make_scaler()
    module.log = lambda *args, **kwargs: None
    optimizer, scales = module.configure_optimizers(), []
    for num_steps, batch in enumerate(fits.loader()):
        optimizer.zero_grad()
        for part in split_batch(batch, 2):
            with torch.autocast("cpu", torch.half):
                loss = module.loss(part)
            scaler.scale(loss * batch_size(part) / batch_size(batch)).backward()
        if num_steps == 1:
            module.blocks[0].linear.weight.grad.mul_(float("inf"))
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return module.state_dict(), scales


@pytest.mark.parametrize(
    ("num_ranks", "schedule"), [(2, "zb_v"), slow((1, "zb_h1")), slow((3, "zb_h1"))]
)
def test_a_step_is_skipped_on_every_rank_where_one_stage_overflows(
    ranks, tmp_path, num_ranks, schedule
):
    weights, scales = train_plain()
    assert scales[1] < scales[0]
    for found, is_left in ranks(num_ranks).run(fit, num_ranks, str(tmp_path), schedule):
        assert found == scales
        assert not is_left
    state = torch.load(tmp_path / "end.ckpt", weights_only=False)
    torch.testing.assert_close(state["state_dict"], weights, rtol=1e-5, atol=1e-7)
    assert state["MixedPrecision"]["scale"] == scales[-1]


def resume(num_devices, folder, ckpt_path):
    return fit(num_devices, folder, "zb_h1", ckpt_path)


def test_a_resumed_fit_goes_on_with_its_loss_scale(ranks, tmp_path):
    ((scales, _), _) = ranks(2).run(fit, 2, str(tmp_path / "whole"), "zb_h1")
    saved = str(tmp_path / "whole" / "step=3.ckpt")
    for found, _ in ranks(2).run(resume, 2, str(tmp_path / "rest"), saved):
        assert found == scales[3:]
    ends = [torch.load(tmp_path / f / "end.ckpt", weights_only=False) for f in ("whole", "rest")]
    torch.testing.assert_close(ends[1]["state_dict"], ends[0]["state_dict"], rtol=0, atol=0)
