"""Which ranks wait for which from one step to the next."""

import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
)

from lightning_pipeoffload.loop import auto_choice
from lightning_pipeoffload.loop.hooks import wrap_gradient_hooks
from lightning_pipeoffload.loop.step_boundary import has_step_barrier
from lightning_pipeoffload.planning.run_plans import make_plan_on_all_ranks
from tests.support import fits
from tests.support.pairs import first, slow

HOUR = timedelta(hours=1)
PATIENCE_SECONDS = 60


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
    hooks = wrap_gradient_hooks(trainer, lambda: None)
    assert has_step_barrier(trainer, hooks) == expected
    for hook in hooks:
        hook.remove()


def test_a_loss_scale():
    trainer = L.Trainer(**fits.SILENT, devices=1)
    trainer.precision_plugin.scaler = torch.amp.GradScaler("cpu")
    trainer.strategy._lightning_module = fits.Net()
    assert has_step_barrier(trainer, [])


def fit(size, options):
    asked = {}

    def note(group, request):
        asked.update({option: request.has_barrier(option) for option in request.options})
        return make_plan_on_all_ranks(group, request)

    tie = options.pop("tie", False)
    trainer = fits.trainer(size, {"schedule": "auto"}, max_steps=1, **options)
    with mock.patch.object(auto_choice, "make_plan_on_all_ranks", note):
        trainer.fit(fits.Net(tie=tie), fits.loader())
    return trainer.strategy.report(), {(o.schedule, o.num_chunks): asked[o] for o in asked}


@pytest.mark.parametrize(
    ("options", "loop", "v"),
    [
        slow(({}, False, False)),
        slow(({"gradient_clip_val": 0.5}, True, True)),
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


class HeldBytes(fits.Net):
    """Global rank 0 ends a step when all other ranks have run forwards of the next."""

    def __init__(self, folder):
        super().__init__()
        self.folder = Path(folder)

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        if self.trainer.global_rank == 0 and batch_idx == 1:
            others = range(1, self.trainer.world_size)
            end = time.monotonic() + PATIENCE_SECONDS
            while not all((self.folder / str(rank)).exists() for rank in others):
                assert time.monotonic() < end, "a rank waits for global rank 0"
                time.sleep(0.01)

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.trainer.strategy.running_action:
            (self.folder / str(self.trainer.global_rank)).touch()
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit_held(schedule, case, folder, size):
    callbacks = [ModelCheckpoint(folder, train_time_interval=HOUR)] if case == "saves" else []
    clips = case == "clips"
    trainer = fits.trainer(
        size,
        {
            "num_microbatches": 2 * size,
            "schedule": schedule,
            "optimizer_sync": "post_validation" if clips else "barrier",
        },
        num_sanity_val_steps=0,
        enable_checkpointing=bool(callbacks),
        callbacks=callbacks,
        max_time=HOUR if case == "ends" else None,
        val_check_interval=HOUR if case == "validates" else None,
        gradient_clip_val=6.0 if clips else None,
        max_steps=4,
    )
    # Batches of workers are sent ahead; others are read when the loop of global rank 0 asks.
    trainer.fit(HeldBytes(folder), fits.loader("in workers", 12), fits.loader(batch_size=12))
    memory = trainer.strategy.report()["memory"]
    trained_and_states = zip(memory["gradients"], memory["optimizer"], strict=True)
    if clips:
        assert memory["step_copies"] == [sum(each) for each in trained_and_states]


@pytest.mark.parametrize(
    ("schedule", "case", "size"),
    first(
        4,
        [
            *(("1f1b", "saves", 3), ("zb_v", "clips", 2), ("interleaved_1f1b", "validates", 2)),
            *(("zb_v", "ends", 2), ("zb_2p", "", 3), ("zb_h1", "saves", 2), ("uniform", "", 2)),
            *(("1f1b", "clips", 3), ("zb_2p", "clips", 2), ("interleaved_1f1b", "clips", 2)),
        ],
    ),
)
def test_the_others_begin_a_step_that_global_rank_0_has_yet_to_end(
    ranks, tmp_path, schedule, case, size
):
    ranks(size).run(fit_held, schedule, case, str(tmp_path), size)
