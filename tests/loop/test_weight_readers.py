"""What is said of hooks that read weights, before a fit runs them."""

from types import SimpleNamespace
from unittest.mock import Mock

import lightning as L
import pytest

from lightning_pipeoffload.loop.weight_readers import check_hooks_reading_weights
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
    check_hooks_reading_weights(trainer)
    line = "Histograms.on_train_epoch_end draws histograms of weights, and a rank has those of"
    assert (line in caplog.text) == warns


class Duck:
    """A callback by its methods alone, as a mock is one."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: {}


def _fit_with(callback):
    L.seed_everything(7, verbose=False)
    trainer = fits.trainer(2, {}, max_epochs=1, callbacks=[callback])
    trainer.fit(fits.Net(), fits.loader(), fits.loader())
    return trainer.global_step


def _fit_with_both():
    mock = Mock(state_key="mock", state_dict=lambda: {})
    return _fit_with(Duck()), _fit_with(mock), mock.on_train_batch_end.call_count


def test_a_callback_may_be_a_mock_or_have_methods_only(ranks):
    for duck, mock, calls in ranks(2).run(_fit_with_both):
        assert duck == mock == calls
