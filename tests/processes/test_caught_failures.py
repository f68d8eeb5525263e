"""What every rank raises alike reaches the caller, and the processes go on."""

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from tests.support import fits

# where a trial fails, on every rank
FAILURES = ("configure_optimizers", "on_train_start", "probe", "step", "on_train_epoch_end")


class Failing(fits.Net):
    """Raises on every rank, once it is told where."""

    failure = ""

    def visit(self, place):
        if place == self.failure:
            raise ValueError(f"no such thing in {place} of {object()}")

    def configure_optimizers(self):
        self.visit("configure_optimizers")
        return super().configure_optimizers()

    def on_train_start(self):
        self.visit("on_train_start")

    def training_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.visit("probe")
        if batch_idx == 2:
            self.visit("step")
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.visit("on_train_epoch_end")


class Saving(L.Callback):
    """A callback of the user's that saves on an exception."""

    def on_exception(self, trainer, *_):
        trainer.save_checkpoint("on_exception.ckpt")


def make_trainer(num_devices, folder):
    saving = ModelCheckpoint(folder, save_on_exception=True)
    return fits.trainer(
        num_devices,
        max_epochs=1,
        callbacks=[OnExceptionCheckpoint(folder), saving, Saving()] if num_devices > 1 else [],
        enable_checkpointing=num_devices > 1,
    )


def sweep(num_devices, failures, keep, folder):
    """Fit once for each failure, and then once without; return what came of it.

    Args:
        num_devices: 0: one, without the strategy.
        failures: where each trial but the last fails.
        keep: "trainer": the same one, with the same module; "module"; or "nothing".
        folder: where several ranks' callbacks try to save on each exception.
    """
    caught, trainer, module = [], None, None
    for failure in (*failures, ""):
        if module is None or keep == "nothing":
            L.seed_everything(7, verbose=False)
            module = Failing(dropout=0.0)
        if trainer is None or keep != "trainer":
            trainer = make_trainer(num_devices, folder)
        module.failure = failure
        try:
            trainer.fit(module, fits.loader(), fits.loader())
        except ValueError as error:
            metrics = trainer.callback_metrics  # nobody waits for what will not come
            caught.append((str(error).partition(" of ")[0], "epoch" in str(metrics)))
    return {
        "caught": [text for text, _ in caught],
        "loss": float(trainer.callback_metrics["val_loss"]),
        "steps": trainer.global_step,
    }


@pytest.mark.parametrize(
    ("size", "failures", "keep"),
    [(2, FAILURES, "nothing"), (3, ("probe", "step"), "trainer"), (1, ("step",), "trainer")],
)
def test_a_sweep_goes_on_after_trials_that_fail_everywhere(ranks, tmp_path, size, failures, keep):
    pool = ranks(size)
    done = pool.run(sweep, size, failures, keep, str(tmp_path))

    plain = sweep(0, failures, keep, "")
    for rank in done:
        assert rank["caught"] == [f"no such thing in {failure}" for failure in failures]
        assert rank["steps"] == plain["steps"]
        assert rank["loss"] == pytest.approx(plain["loss"], rel=1e-9)
    # What callbacks would save on an exception has parts of every rank; the last trial saves.
    assert [path.name[:6] for path in tmp_path.iterdir()] == ["epoch="] * (size > 1)
