"""A step prints, and calls loggers, once for each microbatch."""

import lightning as L
import pytest
from lightning.pytorch.loggers.logger import Logger

from lightning_pipeoffload.loop.step_calls import PrintQuiet
from tests.support import fits


class Spoken(Logger):
    name, version, log_dir = "spoken", 0, "somewhere"

    def __init__(self):
        super().__init__()
        self.said = []
        self.experiment = self

    def add_scalar(self, name, value):
        self.said.append(name)

    def log_metrics(self, metrics, step=None):
        self.said += [name for name in metrics if name == "direct"]

    def log_hyperparams(self, *args, **kwargs):
        pass


class Talking(fits.Net):
    def training_step(self, batch, batch_idx):
        assert self.logger.log_dir == "somewhere"
        assert isinstance(self.logger, Spoken)
        self.print("before the blocks")
        print("printed")  # noqa: T201
        self.logger.experiment.add_scalar("scalar", 1.0)
        self.logger.log_metrics({"direct": 1.0})
        loss = super().training_step(batch, batch_idx)
        self.print("after the blocks")
        return loss


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v"])
def test_once_for_each_microbatch(schedule, capsys):
    L.seed_everything(7, verbose=False)
    logger = Spoken()
    trainer = fits.trainer(1, {"schedule": schedule}, logger=logger, max_steps=2)
    trainer.fit(Talking(), fits.loader(), None)
    said = capsys.readouterr().out
    assert [said.count(text) for text in ("before the", "after the", "printed")] == [8, 8, 8]
    assert [logger.said.count(name) for name in ("scalar", "direct")] == [8, 8]
    assert trainer.logger is logger


class TalkingWithoutBlocks(fits.Net):
    def predict_step(self, batch, batch_idx):
        print("printed")  # noqa: T201
        return self.embed(batch["x"])


def test_a_step_that_runs_whole_prints_too(capsys):
    trainer = fits.trainer(1)
    outputs = trainer.predict(TalkingWithoutBlocks(), fits.loader())
    assert capsys.readouterr().out.count("printed") == len(outputs) == 5


def test_a_step_that_fails_prints_its_output_so_far(capsys):
    def step():
        with PrintQuiet():
            print("the batch has", 3)  # noqa: T201
            raise KeyError

    with pytest.raises(KeyError):
        step()
    assert capsys.readouterr().out == "the batch has 3\n"


def test_a_print_to_a_file_is_not_silenced(tmp_path):
    with PrintQuiet(), (tmp_path / "log").open("w") as file:
        print("text", file=file)
    assert (tmp_path / "log").read_text() == "text\n"
