"""Whoever reads weights first after a step that is taken back has those of ranks that wait."""

from __future__ import annotations

import copy
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

from lightning_pipeoffload import PipeOffloadStrategy, save_pretrained
from tests.loop.test_step_border import assert_same
from tests.support import fits


def values(state):
    return {name: value.clone() for name, value in state.items() if type(value) is torch.Tensor}


def save(trainer, folder):
    """Return a checkpoint, and the weights that are exported from it."""
    trainer.save_checkpoint(folder / "last.ckpt")
    if trainer.is_global_zero:
        save_pretrained(folder / "last.ckpt", folder / "exported")
    trainer.strategy.barrier()
    exported = [path.read_bytes() for path in sorted(folder.glob("exported/*.safetensors"))]
    assert len(exported) == 1
    state = torch.load(folder / "last.ckpt")
    return state["state_dict"], state["optimizer_states"], list(exported[0])


READERS = (
    lambda trainer, module, folder: save(trainer, folder),
    lambda trainer, module, folder: trainer.strategy.gather(module.head.weight).detach(),
    lambda trainer, module, folder: values(module.state_dict()),
    lambda trainer, module, folder: values(copy.deepcopy(module).state_dict()),
    lambda trainer, module, folder: module.head(torch.ones(1, 16).double()).detach(),
    lambda trainer, module, folder: copy.deepcopy(trainer.optimizers[0].state_dict()),
    lambda trainer, module, folder: None,  # after validation
)


class Walk(L.Callback):
    """Reads in another way after each epoch, which is one step.

    No hook of the user's may run right after a step: replicas would wait for each other there.
    """

    def __init__(self, folder):
        self.folder = folder
        self.seen = []

    def on_train_epoch_end(self, trainer, module):
        read = READERS[trainer.current_epoch]
        self.seen.append(read(trainer, module, self.folder))


def fit(sync, num_steps, *callbacks):
    """Fit; each step is clipped, and so taken back. Return the trainer."""
    L.seed_everything(7, verbose=False)
    trainer = L.Trainer(
        **{**fits.SILENT, "num_sanity_val_steps": 0},
        devices=4,
        strategy=PipeOffloadStrategy(
            data_parallel_size=2,
            sharding="optimizer",
            num_microbatches=4,
            schedule="zb_h2",
            optimizer_sync=sync,
        ),
        callbacks=[*callbacks],
        enable_checkpointing=len(callbacks) > 1,
        max_epochs=num_steps,
        limit_train_batches=1,
        check_val_every_n_epoch=len(READERS),
        gradient_clip_val=1e-3,
    )
    trainer.fit(fits.Net(), fits.loader(batch_size=4), fits.loader(batch_size=4))
    assert trainer.strategy.report()["steps_taken_back"] == (num_steps if sync != "barrier" else 0)
    return trainer


def read_all(sync, folder):
    folder = Path(folder, sync)
    walk = Walk(folder)
    trainer = fit(sync, len(READERS), walk)
    average = EMAWeightAveraging(decay=0.5, update_every_n_steps=2)
    saving = ModelCheckpoint(folder / "steps", "{step}", every_n_train_steps=3, save_top_k=-1)
    after = fit(sync, 4, average, saving)
    return {
        "hooks": walk.seen,
        "validation": trainer.callback_metrics["val_loss"],
        "average": values(average._average_model.state_dict()),
        "a save by the step": torch.load(folder / "steps" / "step=3.ckpt")["current_model_state"],
        "a save after the fit": save(after, folder),
    }


def test_every_reader_has_the_weights_of_a_step_that_was_taken_back(ranks, tmp_path):
    for found, expected in zip(
        *(ranks(4).run(read_all, sync, str(tmp_path)) for sync in ("post_validation", "barrier")),
        strict=True,
    ):
        for reader, seen in expected.items():
            assert_same(found[reader], seen)
