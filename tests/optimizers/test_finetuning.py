"""Freezing and unfreezing while training, by Lightning's callback and by hand, as on one device."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning

from tests.support import fits


class Thaw(BaseFinetuning):
    """Trains the last blocks first, then more of them, then all."""

    def freeze_before_training(self, module):
        self.freeze([module.embed, module.blocks[:6]])

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.blocks[3:6], optimizer, lr=0.05)
        if epoch == 2:
            self.unfreeze_and_add_param_group([module.embed, module.blocks[:3]], optimizer)


class Net(fits.Net):
    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


class ByHand(Net):
    """Freezes its first blocks, and tells from how many parameters what trains."""

    def on_train_epoch_start(self):
        self.blocks[:3].requires_grad_(self.current_epoch != 1)
        self.num_trained = sum(p.numel() for p in self.parameters() if p.requires_grad)


def fit(num_devices, folder, by_hand=False, ckpt_path=None, **options):
    L.seed_everything(7, verbose=False)
    module = (ByHand if by_hand else Net)(dropout=0.0)
    record = fits.Record()
    record.on_train_batch_end = lambda trainer, *rest: record.losses.append(
        float(trainer.callback_metrics["train_loss"])
    )
    trainer = L.Trainer(
        **fits.SILENT,
        devices=num_devices or 1,
        strategy=fits.strategy(num_devices, **options),
        callbacks=[record] if by_hand else [record, Thaw()],
        max_epochs=3,
        enable_checkpointing=False,
        limit_val_batches=0,
    )
    trainer.fit(module, fits.loader(), ckpt_path=ckpt_path)
    trainer.save_checkpoint(f"{folder}/{num_devices}.ckpt")
    return record.losses, getattr(module, "num_trained", None)


def fit_in_rank(num_devices, folder, options):
    return fit(num_devices, folder, **options)


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v"])
def test_a_finetuning_callback_works_as_on_one_device(ranks, tmp_path, schedule):
    expected, _ = fit(0, tmp_path)
    for losses, _ in ranks(2).run(fit_in_rank, 2, str(tmp_path), {"schedule": schedule}):
        assert losses == pytest.approx(expected, rel=1e-10)
    plain, found = (torch.load(tmp_path / f"{n}.ckpt", weights_only=False) for n in (0, 2))
    torch.testing.assert_close(found["optimizer_states"], plain["optimizer_states"])
    assert found["callbacks"] == plain["callbacks"]


def test_hooks_of_the_module_may_freeze(ranks, tmp_path):
    expected, count = fit(0, tmp_path, by_hand=True)
    for losses, num_trained in ranks(2).run(fit_in_rank, 2, str(tmp_path), {"by_hand": True}):
        assert losses == pytest.approx(expected, rel=1e-10)
        assert num_trained == count
