"""What is said of hooks that read weights, before a fit runs them."""

from types import SimpleNamespace

import lightning as L
import pytest

from lightning_pipeoffload.loop.weight_readers import check_weight_readers
from tests.support import fits


class Histograms(L.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        self.draw(trainer, pl_module)

    def draw(self, trainer, pl_module):
        for name, parameter in pl_module.named_parameters():
            trainer.logger.experiment.add_histogram(name, parameter)


class OfGathered(Histograms):
    def draw(self, trainer, pl_module):
        for name, parameter in pl_module.named_parameters():
            value = trainer.strategy.gather(parameter)
            trainer.logger.experiment.add_histogram(name, value)


@pytest.mark.parametrize(("callback", "warns"), [(Histograms(), True), (OfGathered(), False)])
def test_histograms_of_weights_are_warned_of_unless_they_are_gathered(caplog, callback, warns):
    trainer = SimpleNamespace(
        lightning_module=fits.Net(), callbacks=[callback], is_global_zero=True
    )
    check_weight_readers(trainer)
    line = "Histograms.on_train_epoch_end draws histograms of weights, and a rank has those of"
    assert (line in caplog.text) == warns
