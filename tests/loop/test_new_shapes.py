"""Steps of new shapes run one microbatch at a time, where the CPU is taken for an accelerator."""

from unittest.mock import patch

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_pipeoffload.planning.training_plan import TrainingPlan
from lightning_pipeoffload.runtime.run import ActivationMemory, Executor
from lightning_pipeoffload.runtime.shapes import ShapeOnly
from lightning_pipeoffload.schedule import COMPUTE
from tests.support import fits
from tests.support.offloaded import memory_of_all
from tests.support.pairs import slow

LENGTHS = (8, 8, 8, 7, 8, 7)
"""Samples of the batches: four microbatches of two each, and one of a single sample."""


class Plans:
    """Records of each training plan whether it has one microbatch at a time, and its allocations.

    Attributes:
        are_cold: Whether the plans run one microbatch at a time.
        allocations: Allocations of host memory in the middle of each.
    """

    def __init__(self):
        self.are_cold, self.allocations = [], []

    def start(self, executor, plan, *args, start=Executor.start):
        start(executor, plan, *args)
        self.before = executor.memory.settings.host.num_allocations
        if not plan.is_forward_only:
            order = [a.microbatch for a in plan[executor.rank] if a.kind in COMPUTE]
            self.are_cold.append(order == sorted(order))

    def end(self, executor, end=Executor.end):
        end(executor)
        self.allocations.append(executor.memory.settings.host.num_allocations - self.before)


def train(as_accelerator, accumulate, options):
    """Return the loss over the epoch, the weights, and what Plans notes."""
    L.seed_everything(7, verbose=False)
    module, plans = fits.Net(depth=4), Plans()
    made = TrainingPlan.__init__

    def make(self, settings, num_ranks, executor, on_accelerator, *args):
        made(self, settings, num_ranks, executor, as_accelerator, *args)

    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    places = [range(s, s + n) for s, n in zip(starts, LENGTHS, strict=True)]
    data = DataLoader(fits.samples(sum(LENGTHS)), batch_sampler=places, collate_fn=fits.collate)
    trainer = fits.trainer(2, options, accumulate_grad_batches=accumulate, max_epochs=1)
    with (
        patch.object(TrainingPlan, "__init__", make),
        patch.object(ActivationMemory, "for_device", memory_of_all),
        patch.object(Executor, "start", lambda *args: plans.start(*args)),
        patch.object(Executor, "end", lambda *args: plans.end(*args)),
    ):
        trainer.fit(module, data)
    weights = [p.detach() for p in module.parameters() if not isinstance(p, ShapeOnly)]
    return (
        float(trainer.callback_metrics["train_loss_epoch"]),
        weights,
        plans.are_cold,
        plans.allocations,
    )


OFFLOADED = {"schedule": "zb_v", "offload": "half"}


@pytest.mark.parametrize(
    ("accumulate", "options"), [(1, OFFLOADED), slow((3, {"offload": "none"}))], ids=str
)
def test_steps_of_new_shapes_run_one_microbatch_at_a_time(ranks, accumulate, options):
    by_plan = ranks(2).run(train, False, accumulate, options)
    as_accelerator = ranks(2).run(train, True, accumulate, options)
    for plain, found in zip(by_plan, as_accelerator, strict=True):
        loss, weights, are_cold, allocations = found
        assert loss == plain[0]
        assert all(map(torch.equal, weights, plain[1]))
        assert are_cold == [True, False, False, True, False, False]
        assert not any(allocations)
        assert not any(plain[2])
        assert any(plain[3]) == (options is OFFLOADED)
