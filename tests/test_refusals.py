"""What cannot be pipelined is refused before the first step; the message says what would do."""

from __future__ import annotations

import lightning as L
import pytest
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.plugins import MixedPrecision

from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.schedule import build
from tests import fits


class Manual(fits.Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Averaged(fits.Net):
    def configure_callbacks(self):
        return [WeightAveraging()]


class TakesIterator(fits.Net):
    def training_step(self, dataloader_iter):
        return self.loss(next(dataloader_iter)[0])


class Gathers(fits.Net):
    def training_step(self, batch, batch_idx):
        self.trainer.strategy.barrier()
        return self.loss(batch)


CASES = [
    (Manual, {}, "manual optimization cannot be pipelined"),
    (Averaged, {}, "WeightAveraging averages a copy of the whole module"),
    (TakesIterator, {}, "training_step(self, dataloader_iter) cannot be pipelined"),
    (Gathers, {}, "barrier() inside a step would wait for ever"),
    (fits.Net, {"schedule": build("1f1b", 4, 8)}, "is for 4 ranks and 8 microbatches"),
    (fits.Net, {"num_microbatches": 3}, "batch of 8 samples cannot be cut into 3"),
    (fits.Net, {"blocks": "block"}, "it has blocks; did you mean 'blocks'?"),
    (fits.Net, {"split": [3, 4]}, "add up to 8 blocks; its 2 entries add up to 7"),
    (fits.Net, {"schedule": "interleaved_1f1b", "num_chunks": 5}, "has 8 blocks for 10 stages"),
]


@pytest.mark.parametrize(("module", "options", "message"), CASES)
def test_it_is_refused(ranks, module, options, message):
    refusals = ranks(2).run(_refusal, module, options)
    assert all(message in refusal for refusal in refusals)


def test_a_scaled_loss_is_refused_before_the_first_step(ranks):
    refusals = ranks(2).run(_refusal, fits.Net, {}, "16-mixed")
    assert all('precision="16-mixed" is not built yet' in refusal for refusal in refusals)


def _refusal(module, options, precision=None):
    """Return the message that a fit is refused with; None if it ran."""
    # Lightning makes bf16-mixed of 16-mixed on CPU, but not of a plugin.
    plugins = [MixedPrecision(precision, "cpu")] if precision else None
    try:
        trainer = L.Trainer(
            **fits.SILENT,
            max_steps=1,
            enable_checkpointing=False,
            devices=2,
            strategy=fits.strategy(2, **options),
            plugins=plugins,
        )
        fits.outlive_failures(trainer)
        trainer.fit(module(), fits.loader())
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


UNBUILT = [
    ("data_parallel_size", 2),
    ("optimizer_sync", "barrier"),
]


@pytest.mark.parametrize(("name", "value"), UNBUILT)
def test_what_is_not_built_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} is not built yet; leave it at"):
        PipeOffloadStrategy(**{name: value})


@pytest.mark.parametrize(
    ("devices", "size", "message"),
    [
        (3, 2, r"devices \(3\) must be a multiple of pipeline_parallel_size \(2\)"),
        (4, 2, r"devices \(4\) are more than pipeline_parallel_size \(2\)"),
    ],
)
def test_devices_that_do_not_fit_are_refused_before_processes_start(devices, size, message):
    strategy = PipeOffloadStrategy(pipeline_parallel_size=size)
    with pytest.raises(ValueError, match=message):
        L.Trainer(**fits.SILENT, devices=devices, strategy=strategy)
