"""What makes all ranks wait for each other between two optimizer steps."""

from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
)

from lightning_pipeoffload.loop import auto_choice
from lightning_pipeoffload.loop.hooks.users_hooks import GradientHooks
from lightning_pipeoffload.loop.step_boundary import has_step_barrier
from lightning_pipeoffload.planning.plan_request import plan_for_all
from tests.support import fits


class Clips(fits.Net):
    def configure_gradient_clipping(self, optimizer, *args, **kwargs):
        self.clip_gradients(optimizer, gradient_clip_val=1.0)


class MayRead(fits.Net):
    def on_before_optimizer_step(self, optimizer):
        pass


OF_LIGHTNING = [LearningRateMonitor(), GradientAccumulationScheduler({0: 2}), EMAWeightAveraging()]


@pytest.mark.parametrize(
    ("module", "options", "expected"),
    [
        (fits.Net, {}, False),
        (fits.Net, {"gradient_clip_val": 0.5}, True),
        (fits.Net, {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, False),
        (fits.Net, {"gradient_clip_val": 0, "gradient_clip_algorithm": "norm"}, False),
        (fits.Net, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}, False),
        (Clips, {}, True),
        (MayRead, {}, True),
        (fits.Net, {"callbacks": OF_LIGHTNING}, False),
    ],
)
def test_clipping_by_norm_and_hooks_that_may_read_gradients(module, options, expected):
    trainer = L.Trainer(**{**fits.SILENT, **options, "devices": 1})
    trainer.strategy._lightning_module = trainer.strategy._module = module()
    trainer.strategy.world_size = 1
    hooks = GradientHooks(trainer, lambda: None)
    assert has_step_barrier(trainer, hooks) == expected
    hooks.remove()


def test_a_loss_scale():
    trainer = L.Trainer(**fits.SILENT, devices=1)
    trainer.precision_plugin.scaler = torch.amp.GradScaler("cpu")
    trainer.strategy._lightning_module = fits.Net()
    assert has_step_barrier(trainer, None)


def fit(size, options):
    asked = {}

    def note(group, request):
        asked.update({option: request.has_barrier(option) for option in request.options})
        return plan_for_all(group, request)

    tie = options.pop("tie", False)
    trainer = L.Trainer(
        **fits.SILENT,
        devices=size,
        strategy=fits.strategy(size, schedule="auto"),
        max_steps=1,
        enable_checkpointing=False,
        **options,
    )
    with mock.patch.object(auto_choice, "plan_for_all", note):
        trainer.fit(fits.Net(tie=tie), fits.loader())
    return trainer.strategy.report(), {(o.schedule, o.num_chunks): asked[o] for o in asked}


@pytest.mark.parametrize(
    ("options", "loop", "v"),
    [
        ({}, False, False),
        ({"gradient_clip_val": 0.5}, True, True),
        ({"tie": True}, True, False),
    ],
    ids=["free", "clipped", "tied weights on the first and the last rank"],
)
def test_a_run_is_planned_as_its_steps_follow_each_other(ranks, options, loop, v):
    report, waits = ranks(3).run(fit, 3, options)[0]
    assert (waits["zb_h1", 1], waits["zb_v", 2]) == (loop, v)
    candidates = [c for c in report["candidates"] if c["fits"]]
    taken = next(c for c in candidates if not c["reason"])
    assert taken["period"] == pytest.approx(report["period"])
    assert taken["period"] <= 1.011 * min(c["period"] for c in candidates)
    for candidate in candidates:
        if waits[candidate["schedule"], candidate["num_chunks"]]:
            assert candidate["period"] == pytest.approx(candidate["makespan"])
