"""Lightning's hooks come in the order of one device, in a fit and after a resume."""

import lightning as L
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

from tests.support import fits

# What may be called for a slice of a batch, and what Lightning no longer calls.
OF_MICROBATCHES = {"transfer_batch_to_device", "on_before_batch_transfer"}
OF_MICROBATCHES |= {"on_after_batch_transfer", "backward", "configure_sharded_model"}
NAMES = [
    name
    for kind in (CheckpointHooks, DataHooks, ModelHooks)
    for name in vars(kind)
    if not name.startswith("_") and name not in OF_MICROBATCHES and "dataloader" not in name
]


class Notes(fits.Net):
    def __init__(self):
        super().__init__()
        self.called = []
        for name in (*NAMES, "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"):
            setattr(self, name, self._noting(name, getattr(self, name)))

    def _noting(self, name, plain):
        def note(*args, **kwargs):
            self.called.append(name)
            return plain(*args, **kwargs)

        return note


def fit_and_resume(num_devices, path):
    found = []
    for epochs, resumed in ((1, None), (2, path)):
        L.seed_everything(7, verbose=False)
        module = Notes()
        trainer = fits.trainer(num_devices, max_epochs=epochs, num_sanity_val_steps=1)
        trainer.fit(module, fits.loader(), fits.loader(), ckpt_path=resumed)
        if resumed is None:
            trainer.save_checkpoint(path)
        found.append(module.called)
    return found


def test_hooks_come_in_the_order_of_one_device(tmp_path):
    expected = fit_and_resume(0, f"{tmp_path}/plain.ckpt")
    assert "on_load_checkpoint" in expected[1]
    assert fit_and_resume(1, f"{tmp_path}/parts.ckpt") == expected
