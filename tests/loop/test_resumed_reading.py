"""A fit that resumes reads what the uninterrupted one reads, whatever its data draw."""

import lightning as L
import pytest
import torch

from tests.loop.test_data import RANDOM, leaves
from tests.support import fits
from tests.support.pairs import some


class Mixed(L.LightningModule):
    """Mixes each batch by a number of the global generator, in a hook of the transfer."""

    def __init__(self, make):
        super().__init__()
        self.make, self.batches = make, []
        self.blocks = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(2))).double()

    def train_dataloader(self):
        return self.make()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return leaves(batch) * torch.rand(()).double()

    def training_step(self, batch, batch_idx):
        return self.blocks(batch[:, None]).mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.batches.append((self.trainer.global_step, batch.tolist()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAfter(L.Callback):
    """Saves after each of some steps."""

    def __init__(self, folder, steps):
        self.folder, self.steps = folder, steps

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(f"{self.folder}/{trainer.global_step}.ckpt")


# Of four batches in an epoch: within the first, at its end, and within the second.
SAVED = (2, 4, 5)
# Workers that live on draw other numbers, and so does a stream of them.
RESUMED = [name for name in RANDOM if "persistent" not in name]


def fit(name, folder, path=None):
    L.seed_everything(7 if path is None else 8, workers=True, verbose=False)
    module = Mixed(RANDOM[name])
    saving = SaveAfter(folder, () if path else SAVED)
    trainer = fits.trainer(2, {"num_microbatches": 1}, max_epochs=3, callbacks=[saving])
    trainer.fit(module, ckpt_path=path)
    return module.batches


def fit_and_resume(name, folder):
    """Return the batches of a fit, and those of fits that resume it by the step of each."""
    whole = fit(name, folder)
    return whole, {step: fit(name, folder, f"{folder}/{step}.ckpt") for step in SAVED}


@pytest.mark.parametrize("name", some(RESUMED, 5))
def test_the_rest_is_what_the_uninterrupted_fit_reads(ranks, tmp_path, name):
    (whole, rests), other = ranks(2).run(fit_and_resume, name, str(tmp_path))
    assert (whole, rests) == other
    for step, rest in rests.items():
        assert rest == [batch for batch in whole if batch[0] > step]


def resume_older(folder):
    whole = fit("shuffle", folder)
    path = f"{folder}/{SAVED[0]}.ckpt"
    if torch.distributed.get_rank() == 0:
        checkpoint = torch.load(path, weights_only=True)
        del checkpoint["pipeoffload_read"], checkpoint["pipeoffload_num_entries"]
        torch.save(checkpoint, path)
    torch.distributed.barrier()
    return len(whole), [step for step, _ in fit("shuffle", folder, path)]


def test_an_older_checkpoint_leaves_out_as_many_batches(ranks, tmp_path):
    for num_steps, rest in ranks(2).run(resume_older, str(tmp_path)):
        assert rest == [*range(SAVED[0] + 1, num_steps + 1)]
