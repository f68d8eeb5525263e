"""After each hook of an epoch's end the root publishes; all ranks have to have the same ones."""

from types import SimpleNamespace

import lightning as L
import pytest

from lightning_pipeoffload.loop.hooks.users_hooks import EndHooks, refuse_other_callbacks


class Module(L.LightningModule):
    def on_test_end(self):
        self.passed = True


class Keeps(L.Callback):
    def on_validation_epoch_end(self, trainer, module):
        module.kept = trainer


def test_it_publishes_after_each_hook_and_gives_them_back():
    module, callback, ticks = Module(), Keeps(), []
    own = callback.on_test_epoch_end = lambda trainer, module: "own"
    trainer = SimpleNamespace(lightning_module=module, callbacks=[callback])
    hooks = EndHooks(trainer, lambda: ticks.append(len(ticks)))
    module.on_test_end()
    module.on_train_epoch_end()  # not the user's, but callbacks come after it
    callback.on_validation_epoch_end(1, module)
    assert callback.on_test_epoch_end(None, None) == "own"
    assert (module.passed, module.kept, ticks) == (True, 1, [0, 1, 2, 3])
    hooks.remove()
    assert not {"on_train_epoch_end", "on_test_end"} & vars(module).keys()
    assert vars(callback) == {"on_test_epoch_end": own}


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
