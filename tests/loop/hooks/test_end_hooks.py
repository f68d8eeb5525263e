"""Hooks that use what steps collected, as global rank 0 and as another rank run them."""

from __future__ import annotations

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torchmetrics import SumMetric

from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.loop.hooks.end_hooks import EndHooks, refuse_other_callbacks


class Module(L.LightningModule):
    of_class = []

    def __init__(self):
        super().__init__()
        self.metric, self.losses, self.passed = SumMetric(), [], []

    def step(self):
        self.losses.append(torch.ones(()))

    def on_train_epoch_end(self):
        self.passed.append("start")
        torch.stack(self.losses)
        self.passed.append("end")

    def on_predict_epoch_end(self):
        torch.stack(self.of_class)
        self.passed.append("stacked")

    def on_test_end(self):
        torch.stack(type(self).of_class + Module.of_class)
        self.passed.append("stacked")

    def on_test_epoch_end(self):
        self.metric.compute()
        self.passed.append("computed")

    def on_validation_epoch_end(self):
        self.log("metric", self.metric)
        self.passed.append("logged")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.passed.append(outputs["loss"])


class Keeps(L.Callback):
    def __init__(self):
        self.kept = []

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.kept.append(outputs["rows"])

    def on_validation_epoch_end(self, trainer, module):
        torch.cat(self.kept)
        module.passed.append("joined")


@pytest.fixture
def build():
    def make(is_root, written=((), ()), callback=None):
        """Return hooks on a rank; ``written`` on global rank 0 by module and callback."""
        connector = SimpleNamespace(
            is_root=is_root,
            tick=lambda: None,
            news=lambda wait=True: written,
            outputs=lambda: {"loss": 2.0},
        )
        trainer = SimpleNamespace(lightning_module=Module(), callbacks=[callback or Keeps()])
        return EndHooks(trainer, connector), trainer.lightning_module, trainer.callbacks[0]

    return make


def test_global_rank_0_runs_to_the_end_and_knows_where_the_others_left(build):
    hooks, module, _ = build(is_root=True)
    with hooks.watching_step():
        module.step()
    module.passed = SimpleNamespace(append=lambda what: seen.append((what, hooks.left)))
    seen = []
    module.on_train_epoch_end()
    assert seen == [("start", ""), ("end", "on_train_epoch_end where it reads losses")]
    assert hooks.left == ""


def test_another_rank_leaves_at_what_only_global_rank_0_has_written(build):
    _, module, _ = build(is_root=False, written=(["losses"], []))
    module.on_train_epoch_end()
    assert module.passed == ["start"]


@pytest.mark.parametrize("hook", ["on_predict_epoch_end", "on_test_end"])
def test_a_list_of_the_class_is_left_alike(build, hook):
    hooks, module, _ = build(is_root=True)
    with hooks.watching_step():
        Module.of_class.append(torch.ones(()))
    getattr(module, hook)()
    assert module.passed == ["stacked"]
    Module.of_class.clear()
    written = hooks._connector.describe()
    _, module, _ = build(is_root=False, written=written)
    getattr(module, hook)()
    assert written[0] == ["of_class"]
    assert not module.passed


def test_what_was_written_here_too_is_used_here(build):
    hooks, module, _ = build(is_root=False, written=(["losses"], []))
    with hooks.watching_step():
        module.step()
    module.on_train_epoch_end()
    assert module.passed == ["start", "end"]


@pytest.mark.parametrize("hook", ["on_test_epoch_end", "on_validation_epoch_end"])
def test_another_rank_leaves_at_a_metric_that_was_not_updated_there(build, hook):
    _, module, _ = build(is_root=False)
    getattr(module, hook)()
    assert not module.passed


def test_numbers_among_the_outputs_are_everywhere_and_the_rest_is_not(build):
    _, module, callback = build(is_root=False, written=([], ["kept"]))
    module.on_train_batch_end({"loss": 0.0}, None, 0)
    callback.on_validation_batch_end(None, module, None, None, 0)
    callback.on_validation_epoch_end(None, module)
    assert (module.passed, callback.kept) == ([2.0], [])


def test_the_objects_get_their_own_hooks_back(build):
    hooks, module, callback = build(is_root=False)
    hooks.remove()
    assert not {"on_train_epoch_end", "on_test_epoch_end"} & vars(module).keys()
    assert vars(callback).keys() == {"kept"}


def test_a_hook_of_the_instance_is_watched_and_given_back(build):
    plain = Keeps()
    own = plain.on_test_epoch_end = lambda trainer, module: torch.stack(plain.kept)
    hooks, _, callback = build(is_root=False, written=([], ["kept"]), callback=plain)
    assert callback.on_test_epoch_end(None, None) is None
    hooks.remove()
    assert callback.on_test_epoch_end is own


@pytest.mark.parametrize("callbacks", [[], [Keeps(), Keeps()]])
def test_callbacks_that_global_rank_0_does_not_have_are_refused(callbacks):
    strategy = SimpleNamespace(broadcast=lambda mine: ["Module", "Keeps"])
    trainer = SimpleNamespace(
        lightning_module=Module(), callbacks=callbacks, strategy=strategy, global_rank=1
    )
    with pytest.raises(ValueError, match="Module, Keeps on global rank 0, of Module"):
        refuse_other_callbacks(trainer)


def test_callbacks_without_hooks_at_ends_may_differ():
    strategy = SimpleNamespace(broadcast=lambda mine: ["Module"])
    refuse_other_callbacks(
        SimpleNamespace(lightning_module=Module(), callbacks=[L.Callback()], strategy=strategy)
    )


@pytest.mark.parametrize("name", ["barrier", "broadcast", "reduce_boolean_decision"])
def test_what_needs_all_ranks_is_refused_behind_a_line_where_others_left(name):
    strategy = PipeOffloadStrategy()
    strategy._end_hooks = SimpleNamespace(left="on_train_epoch_end where it reads losses")
    with pytest.raises(RuntimeError, match="have left on_train_epoch_end where it reads losses"):
        getattr(strategy, name)(True)
