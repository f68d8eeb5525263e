"""Callbacks that average weights: each rank its own part, as on one device."""

import copy
import math

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch.optim.swa_utils import get_ema_multi_avg_fn

from tests import test_tensor_parallel as tensor_ranks
from tests.support import fits
from tests.support.pairs import slow


class OwnTeacher(L.Callback):
    """A copy that follows the module, and takes its place in validation."""

    def __init__(self, hook):
        self.hook = hook
        self.teacher = None
        self.loaded = None

    def setup(self, trainer, module, stage):
        if self.hook == "setup":
            self.teacher = copy.deepcopy(module).requires_grad_(False)

    def on_fit_start(self, trainer, module):
        if self.hook == "on_fit_start":
            self.teacher = copy.deepcopy(module).requires_grad_(False)
        if self.loaded is not None:
            self.teacher.load_state_dict(self.loaded)

    def on_train_batch_end(self, trainer, module, *args):
        with torch.no_grad():
            for mean, now in zip(self.teacher.parameters(), module.parameters(), strict=True):
                mean.lerp_(now, 0.1)

    def exchange(self, module):
        for mean, now in zip(self.teacher.parameters(), module.parameters(), strict=True):
            before = mean.data.clone()
            mean.data.copy_(now.data)
            now.data.copy_(before)

    def on_validation_start(self, trainer, module):
        if not trainer.sanity_checking:
            self.exchange(module)

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.exchange(module)

    def state_dict(self):
        return {"teacher": self.teacher.state_dict()}

    def load_state_dict(self, state):
        self.loaded = state["teacher"]


AVERAGES = {
    "mean": lambda: WeightAveraging(),
    "ema": lambda: EMAWeightAveraging(decay=0.9),
    "foreach": lambda: WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "swa": lambda: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1),
    "teacher": lambda: OwnTeacher("setup"),
    "teacher on_fit_start": lambda: OwnTeacher("on_fit_start"),
}


class ValidationLosses(L.Callback):
    def __init__(self):
        self.values = []

    def on_validation_end(self, trainer, module):
        self.values.append(float(trainer.callback_metrics["val_loss"]))


def average(size, name, folder, epochs, resume, options):
    """Fit with one of ``AVERAGES``; return what it came to, with this rank's weights."""
    L.seed_everything(7, workers=True, verbose=False)
    losses = ValidationLosses()
    saving = ModelCheckpoint(folder, "last", enable_version_counter=False)
    module = fits.Net(dropout=0.0, tie=True)
    trainer = fits.trainer(
        size,
        options,
        callbacks=[AVERAGES[name](), losses, saving],
        max_epochs=epochs,
        enable_checkpointing=True,
    )
    trainer.fit(module, fits.loader(), fits.loader(), ckpt_path=resume)
    weights = {
        name: (trainer.strategy.gather(value) if size > 1 else value).tolist()
        for name, value in module.named_parameters()
    }
    return {"losses": losses.values, "weights": weights}


FOLDER = {"save_distributed_checkpoint": True}


def same(found, plain):
    losses = torch.tensor(found["losses"]), torch.tensor(plain["losses"])
    assert torch.allclose(*losses, rtol=0, atol=1e-9)
    assert found["weights"].keys() == plain["weights"].keys()
    for name, value in plain["weights"].items():
        expected = torch.tensor(value, dtype=torch.float64)
        mine = torch.tensor(found["weights"][name], dtype=torch.float64)
        assert torch.allclose(mine, expected, rtol=0, atol=1e-9), name


@pytest.mark.parametrize(
    ("size", "name", "options"),
    [
        slow((2, "mean", {})),
        slow((3, "ema", {"schedule": "zb_v", **FOLDER})),
        slow((2, "foreach", FOLDER)),
        slow((2, "swa", {"schedule": "zb_v", **FOLDER})),
        (2, "teacher on_fit_start", FOLDER),
    ],
)
def test_weights_and_validation_are_those_of_one_device_after_a_resume_too(
    ranks, tmp_path, size, name, options
):
    plain, split = str(tmp_path / "plain"), str(tmp_path / "split")
    paths = f"{plain}/last.ckpt", f"{split}/last.ckpt"
    same(
        ranks(size).run(average, size, name, split, 2, None, options)[0],
        average(0, name, plain, 2, None, {}),
    )
    rest = average(0, name, f"{plain}/rest", 3, paths[0], {})
    same(ranks(size).run(average, size, name, f"{split}/rest", 3, paths[1], options)[0], rest)
    if not options.get("save_distributed_checkpoint"):
        same(average(0, name, f"{plain}/crossed", 3, paths[1], {}), rest)


class SavesAverage(OwnTeacher):
    """Keeps a state dict of the copy, in its own state and in the checkpoint."""

    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["averages"] = copy.deepcopy(self.teacher.state_dict())


def average_over_tensor_ranks(sizes, name, folder, max_steps, resume, pipeline):
    """Fit layers that tensor ranks share, and return what the checkpoint has at the end."""
    callbacks = [AVERAGES[name]() if name != "teacher" else SavesAverage("on_fit_start")]
    *numbers, path = tensor_ranks.fit(
        sizes,
        folder,
        {"plan": "sequence"},
        pipeline,
        ckpt_path=resume,
        callbacks=callbacks,
        max_steps=max_steps,
    )
    return numbers, path


@pytest.mark.parametrize(
    ("sizes", "name", "pipeline"),
    [
        ((2, 2), "ema", {}),
        slow(((1, 2), "ema", {"schedule": "1f1b"})),
        slow(((2, 2), "ema", {"schedule": "zb_v", **FOLDER})),
        slow(((1, 2, 2), "mean", {"sharding": "optimizer"})),
        slow(((2, 2, 2), "foreach", FOLDER)),
        slow(((2, 2), "teacher", {})),
        slow(((2, 2), "teacher", FOLDER)),
    ],
)
def test_averages_of_shards_are_saved_whole(ranks, tmp_path, sizes, name, pipeline):
    """Average over tensor ranks: the checkpoint, and a fit that resumes it, as without them."""
    whole = (1, 1, sizes[2]) if len(sizes) > 2 else ()  # Lightning shuffles replicas' data
    paths = None, None
    for folder, max_steps in ("first", 3), ("resumed", 5):
        of_one = tmp_path / "one" / folder, max_steps, paths[0], {}
        of_ranks = tmp_path / "ranks" / folder, max_steps, paths[1], pipeline
        if whole:
            expected = ranks(sizes[2]).run(average_over_tensor_ranks, whole, name, *of_one)[0]
        else:
            expected = average_over_tensor_ranks((), name, *of_one)
        pool = ranks(math.prod(sizes))
        found = pool.run(average_over_tensor_ranks, sizes, name, *of_ranks)[0]
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-12)
        paths = expected[1], found[1]
        if not pipeline.get("save_distributed_checkpoint"):
            check_saved(*paths)


def check_saved(expected, found):
    """Compare all tensors of two checkpoints."""
    found, expected = (torch.load(path, weights_only=False) for path in (found, expected))
    keys = ["state_dict", "current_model_state", "averaging_state", "averages", "callbacks"]
    keys = [key for key in keys if key in expected]
    torch.testing.assert_close(
        *({key: dict(each[key]) for key in keys} for each in (found, expected)),
        rtol=0,
        atol=1e-12,
    )
