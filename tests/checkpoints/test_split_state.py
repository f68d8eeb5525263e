"""Checkpoints of both forms: written at one size, read at any other and in the plain module."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from lightning_pipeoffload.optimizers.optimizer_state import follow_parameters
from tests.support import fits
from tests.support.pairs import slow

EXACT = {"rel": 1e-12, "abs": 0}
PLAIN = {"dropout": 0.0}


def fit(size, folder, options):
    return fits.fit(size, folder, **options)


def run(ranks, size, folder, options):
    if not size:
        return fit(0, folder, options)
    return ranks(size).run(fit, size, folder, options)[0]


def consolidate(folder):
    """Make the one file that Lightning's command makes of a folder."""
    file = f"{folder}.consolidated"
    if not Path(file).exists():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["consolidate_checkpoint", str(folder)])
            runpy.run_module(
                "lightning.pytorch.utilities.consolidate_checkpoint", run_name="__main__"
            )
    return file


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A fit of three epochs on one device."""
    folder = str(tmp_path_factory.mktemp("whole"))
    return fits.fit(0, folder, module=PLAIN, trainer={"max_epochs": 3})


@pytest.fixture(scope="module")
def write(ranks, tmp_path_factory):
    """Fit two epochs at a size; the results are kept, as many tests read them."""
    made = {}

    def fit_once(size, form):
        if (size, form) not in made:
            options = {"save_distributed_checkpoint": form == "folder"} if size else {}
            folder = str(tmp_path_factory.mktemp(f"{form}{size}"))
            made[size, form] = run(ranks, size, folder, {"module": PLAIN, **options})
        return made[size, form]

    return fit_once


@pytest.mark.parametrize(
    ("size", "form", "read_at"),
    [
        *((0, "file", 2), (2, "file", 0), (4, "folder", 0)),
        *map(slow, [(2, "folder", 4), (1, "file", 4), (1, "folder", 2), (4, "file", 1)]),
    ],
)
def test_training_goes_on_at_another_size(ranks, write, whole, tmp_path, size, form, read_at):
    path = write(size, form)["best"]
    assert Path(path).is_dir() == (form == "folder")
    if form == "folder" and not read_at:
        path = consolidate(path)
    rest = {"module": PLAIN, "trainer": {"max_epochs": 3}, "ckpt_path": path}
    resumed = run(ranks, read_at, str(tmp_path), rest)
    assert resumed["losses"] == pytest.approx(whole["losses"][10:], **EXACT)
    assert resumed["rates"] == pytest.approx(whole["rates"][10:])


@pytest.mark.parametrize(
    ("size", "form"),
    [
        (2, "file"),
        (2, "folder"),
        *map(slow, [(1, "file"), (1, "folder"), (4, "file"), (4, "folder")]),
    ],
)
def test_the_plain_module_loads_it(write, size, form):
    written = write(size, form)
    path = written["best"] if form == "file" else consolidate(written["best"])
    module = fits.Net.load_from_checkpoint(path, map_location="cpu", weights_only=True)
    module.eval()
    losses = [module.loss(batch).item() for batch in fits.loader()]
    assert sum(losses) / len(losses) == pytest.approx(written["metrics"]["val_loss"], rel=1e-12)


def test_an_optimizers_state_follows_the_parameters():
    weight = torch.ones(2, device="meta", requires_grad=True)
    optimizer = torch.optim.AdamW([weight])
    optimizer.state[weight] = {"step": torch.tensor(1.0), "exp_avg": torch.ones(2)}
    follow_parameters(optimizer)
    found = {name: value.device.type for name, value in optimizer.state[weight].items()}
    assert found == {"step": "cpu", "exp_avg": "meta"}
