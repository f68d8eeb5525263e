"""Ranks compare each batch, and all that decides the optimizers' steps."""

import threading
from collections import Counter
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from unittest import mock

import lightning as L
import pytest
import torch
from torch.distributed import PrefixStore

from lightning_pipeoffload.loop.exchange import Exchange, Flags
from tests.support import fits
from tests.support.pairs import some


def test_what_a_rank_says_is_read_a_batch_later_and_at_once_where_all_have_to_agree():
    group = SimpleNamespace(num_replicas=1, replica=0, world=SimpleNamespace(num_processes=1))
    exchange = Exchange(SimpleNamespace(group=group), False, False)
    exchange.end_batch(Flags(stops=True))
    assert exchange.pop_flags() == Flags()
    assert exchange.all_ranks_want_stop()
    exchange.end_batch(Flags(exceeds_planned_memory=True, due_clocks=2))
    assert exchange.pop_flags() == Flags(stops=True)
    assert not exchange.all_ranks_want_stop()
    exchange.end_batch()  # a batch of an evaluation
    assert exchange.flush(Flags()) == Flags(exceeds_planned_memory=True, due_clocks=2)


class Apart(fits.Net):
    """Global rank 1 sets what the others do not, in a hook."""

    def __init__(self, hook, change):
        super().__init__(depth=4)
        self.change = change
        plain = getattr(self, hook)
        setattr(self, hook, lambda *args, **kwargs: self.run(plain, *args, **kwargs))

    def run(self, plain, *args, **kwargs):
        is_second = self.trainer.global_step == 2 and not self.trainer.sanity_checking
        if self.trainer.global_rank == 1 and is_second:
            return self.change(self, plain, *args, **kwargs)
        return plain(*args, **kwargs)

    def configure_optimizers(self):
        parameters = list(self.parameters())
        groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
        optimizer = torch.optim.AdamW(groups, lr=0.03)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)]

    def factor(self, epoch):
        return 1.0


def setting(key, value, group=0):
    def change(module, plain, *args, **kwargs):
        module.trainer.optimizers[0].param_groups[group][key] = value
        return plain(*args, **kwargs)

    return change


def freeze(module, plain, *args):
    module.head.requires_grad_(False)
    plain(*args)


def skip(module, plain, epoch, batch_idx, optimizer, closure):
    closure()


RATE = "lr in group 0 of optimizer 0 is 0.03 on global rank 0 and 0.5 on global rank 1"
VARIANTS = {
    "on_train_batch_end": (setting("lr", torch.tensor(0.5)), RATE),
    "on_before_optimizer_step": (
        setting("weight_decay", 0.5, group=1),
        "weight_decay in group 1 of optimizer 0 is 0.01 on global rank 0 and 0.5 on global rank 1",
    ),
    "on_train_epoch_end": (setting("lr", 0.5), RATE),
    "on_validation_epoch_end": (setting("lr", 0.5), RATE),
    "factor": (lambda module, plain, epoch: 0.5, "lr in group 0 of optimizer 0 is 0.03 on glob"),
    "on_before_zero_grad": (freeze, "head.weight is trained on global rank 0 and frozen on glob"),
    "optimizer_step": (skip, "the number of calls of optimizer.step is 3 on global rank 0 and 2"),
}


def refusal(size, variant, **options):
    torch.manual_seed(0)
    trainer = fits.trainer(size, options, max_epochs=3, limit_train_batches=2, limit_val_batches=1)
    fits.outlive_failures(trainer)
    with pytest.raises(ValueError, match="have to run the same") as refused:
        trainer.fit(Apart(variant, VARIANTS[variant][0]), fits.loader(), fits.loader())
    return str(refused.value)


@pytest.mark.parametrize("variant", some(VARIANTS, 3))
def test_ranks_that_set_other_options_end_with_what_differs(ranks, variant):
    for words in ranks(2).run(refusal, 2, variant):
        assert VARIANTS[variant][1] in words
        assert "trainer.callback_metrics" in words


def test_replicas_that_set_other_options_end_too(ranks):
    said = ranks(2).run(partial(refusal, data_parallel_size=2), 2, "on_train_batch_end")
    assert all(RATE in words for words in said)


class Counting(L.Callback):
    """Counts the main thread's calls of stores in three steps of a fit, after its first three."""

    def __init__(self):
        self.calls, self.is_on = Counter(), False

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.is_on = batch_idx in (3, 4, 5)

    def method(self, name):
        plain = getattr(PrefixStore, name)

        def call(store, *args):
            if self.is_on and threading.current_thread() is threading.main_thread():
                self.calls[name] += 1
            return plain(store, *args)

        return mock.patch.object(PrefixStore, name, call)


def count_calls():
    counting = Counting()
    with ExitStack() as stack:
        for name in ("set", "get", "check", "wait", "add", "compare_set", "multi_get"):
            stack.enter_context(counting.method(name))
        trainer = fits.trainer(2, max_steps=8, callbacks=[counting], num_sanity_val_steps=0)
        trainer.fit(fits.Net(depth=4), fits.loader(batch_size=4))
    return dict(counting.calls)


def test_a_healthy_step_makes_no_request_to_a_store_but_publishes_its_numbers(ranks):
    # The root publishes after the step and after the hooks of the batch's end, and waits for none.
    assert ranks(2).run(count_calls) == [{"set": 6}, {}]
