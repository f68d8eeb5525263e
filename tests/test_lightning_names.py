"""`lightning.pytorch` and `pytorch_lightning` are one copy, whichever of them a program imports."""

import importlib
import subprocess
import sys

import pytest

from lightning_pipeoffload import lightning_names

# What a program does that is not on Linux
ELSEWHERE = "import sys; sys.platform = 'win32'; import lightning_pipeoffload"


def test_other_systems_are_refused_by_name():
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True)
    assert "ImportError: lightning_pipeoffload runs on Linux only, and this is win32" in done.stderr


# The class of each part comes from the other name than its neighbour's.
MIXED = """
import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities.rank_zero import rank_zero_only


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.blocks = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])

    def training_step(self, batch, batch_idx):
        loss = self.blocks(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Seen(Callback):
    def on_train_end(self, trainer, pl_module):
        print(f"end {trainer.global_step}", flush=True)  # in one write


if __name__ == "__main__":
    saving = ModelCheckpoint("kept", monitor="loss")
    trainer = L.Trainer(
        strategy="pipeoffload_zb_h1",
        callbacks=[saving, EarlyStopping("loss"), Seen()],
        **dict(accelerator="cpu", devices=2, max_epochs=1, logger=False),
    )
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(16, 8), 8))
    assert isinstance(trainer, pl.Trainer) and isinstance(trainer.strategy, PipeOffloadStrategy)
    assert isinstance(trainer.strategy, pl.strategies.Strategy)
    if trainer.is_global_zero:
        Net.load_from_checkpoint(saving.best_model_path)
        print("name", pl.__name__)
"""
OURS = "from lightning_pipeoffload import PipeOffloadStrategy\n"
THEIRS = "import pytorch_lightning as pl\n"


def run(program, folder):
    (folder / "program.py").write_text(program)
    command = [sys.executable, "program.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.slow  # the grid has fits by either name
@pytest.mark.parametrize(
    ("imports", "name"),
    [(OURS + THEIRS, "lightning.pytorch"), (THEIRS + OURS, "pytorch_lightning")],
)
def test_a_program_may_mix_the_names_of_lightning(tmp_path, imports, name):
    done = run(imports + MIXED, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("end 2") == 2
    assert f"name {name}" in done.stdout


@pytest.mark.slow
def test_two_copies_that_are_imported_already_are_refused(tmp_path):
    done = run("import lightning as L\n" + THEIRS + OURS, tmp_path)
    assert "ImportError: lightning.pytorch and pytorch_lightning are both imported" in done.stderr
    assert "import lightning_pipeoffload before them" in done.stderr


def test_packages_of_two_versions_are_refused(monkeypatch):
    versions = {"lightning": "2.6.6", "pytorch-lightning": "2.5.0"}
    monkeypatch.setattr(lightning_names, "version", versions.get)
    with pytest.raises(ImportError, match=r"2\.6\.6 and pytorch_lightning 2\.5\.0; install one"):
        importlib.import_module("pytorch_lightning.demos.lstm")


def test_a_module_keeps_what_importlib_knows_of_it():
    other, module = map(importlib.import_module, ("pytorch_lightning", "lightning.pytorch"))
    assert other is module
    assert module.__spec__.name == module.__name__ == "lightning.pytorch"
    assert importlib.reload(other) is module
    assert importlib.util.find_spec("pytorch_lightning.no_such_module") is None
