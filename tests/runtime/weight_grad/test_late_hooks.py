"""Hooks on weights that are registered while the training runs."""

import lightning as L
import pytest

from tests.support import fits


class HooksFromFifthBatch(L.Callback):
    """Registers a hook on every weight as the fifth batch starts, and counts its calls."""

    def __init__(self, kind):
        self.kind, self.num_calls = kind, 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 4:
            for parameter in module.parameters():
                getattr(parameter, self.kind)(self.halve)

    def halve(self, value):
        self.num_calls += 1
        if self.kind == "register_hook":
            return 0.5 * value
        value.grad.mul_(0.5)  # of all microbatches so far
        return None


def fit(num_ranks, kind, schedule="zb_h1"):
    L.seed_everything(3, verbose=False)
    hooks, record = HooksFromFifthBatch(kind), fits.Record()
    options = {"schedule": schedule, "num_microbatches": 2}
    trainer = fits.trainer(num_ranks, options, max_steps=8, callbacks=[hooks, record])
    trainer.fit(fits.Net(dropout=0.0, depth=4), fits.loader())
    return hooks.num_calls, record.losses


def test_a_hook_that_is_registered_in_the_fifth_batch_is_called_from_then_on(ranks):
    _, expected = fit(0, "register_hook")
    found = ranks(2).run(fit, 2, "register_hook")
    num_parameters = len([*fits.Net(depth=4).parameters()])
    num_backwards = 4 * 2  # the last four batches of eight, two microbatches each
    assert sum(num_calls for num_calls, _ in found) == num_backwards * num_parameters
    for _, losses in found:
        assert losses == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_a_hook_after_accumulation_too(ranks, schedule):
    kind = "register_post_accumulate_grad_hook"
    found = ranks(2).run(fit, 2, kind, schedule)
    num_calls, losses = ranks(1).run(fit, 1, kind, "1f1b")[0]
    assert sum(calls for calls, _ in found) == num_calls
    assert found[0][1] == losses
