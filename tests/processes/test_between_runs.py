"""What a trainer, its module and its callbacks are before the first run, in it and after it."""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
from functools import partial
from itertools import chain
from threading import Lock
from unittest.mock import patch

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ThroughputMonitor, TQDMProgressBar
from lightning.pytorch.profilers import PyTorchProfiler
from torchmetrics.metric import jit_distributed_available

from lightning_pipeoffload.metrics import MetricCalls
from lightning_pipeoffload.schedule import COMPUTE
from tests.support import fits
from tests.support.pairs import slow


class Look(L.Callback):
    """Notes in which mode evaluation hooks run."""

    modes: tuple[str, ...] = ()

    def _note(self, *args):
        self.modes = *self.modes, torch.is_inference_mode_enabled()

    on_validation_start = on_test_epoch_start = on_predict_end = _note


def make_trainer(num_devices, **options):
    return fits.trainer(
        num_devices, num_sanity_val_steps=0, **options, max_epochs=1, limit_train_batches=2
    )


def look_before(num_devices, folder):
    strategy = make_trainer(num_devices, default_root_dir=folder).strategy
    strategy.barrier()
    trainer = make_trainer(num_devices, default_root_dir=folder)
    return trainer.log_dir, strategy.broadcast("mine"), strategy.reduce_boolean_decision(False)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_before_the_first_run_nobody_is_waited_for(ranks, tmp_path, num_ranks):
    found = ranks(num_ranks).run(look_before, num_ranks, str(tmp_path))
    assert found == [(str(tmp_path), "mine", False)] * num_ranks


def read_folder_in_steps(num_devices, folder):
    module, read = fits.Net(), []
    plain = module.training_step

    def training_step(batch, batch_idx):
        read.append(module.trainer.log_dir)
        return plain(batch, batch_idx)

    module.training_step = training_step
    make_trainer(num_devices, default_root_dir=folder).fit(module, fits.loader())
    return set(read)


def _count_saves():
    with patch.object(torch, "save", wraps=torch.save) as save:
        fits.trainer(1, {}, max_steps=2).fit(fits.Net(), fits.loader())
    return save.call_count


def test_one_rank_pickles_nothing_for_others(ranks):
    assert ranks(1).run(_count_saves) == [0]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_reads_the_folder_of_the_run(ranks, tmp_path, num_ranks):
    found = ranks(num_ranks).run(read_folder_in_steps, num_ranks, str(tmp_path))
    assert found == [{str(tmp_path)}] * num_ranks


def look_at_modes(num_devices, inference_mode):
    look, module = Look(), fits.Net()
    trainer = make_trainer(num_devices, callbacks=[look], inference_mode=inference_mode)
    trainer.validate(module, fits.loader(), verbose=False)
    module.test_step = module.validation_step
    trainer.test(module, fits.loader(), verbose=False)
    del module.test_step
    predictions = trainer.predict(module, fits.loader())
    trainer.fit(module, fits.loader())
    return look.modes, predictions is None


@pytest.mark.parametrize("inference_mode", [True, False])
def test_evaluation_runs_in_inference_mode_and_predictions_are_on_global_rank_0(
    ranks, inference_mode
):
    found = ranks(2).run(look_at_modes, 2, inference_mode)
    assert found == [((inference_mode,) * 3, False), ((inference_mode,) * 3, True)]


def save_after(num_devices):
    bar, module = TQDMProgressBar(), fits.Net()
    trainer = make_trainer(
        num_devices, callbacks=[bar], enable_progress_bar=True, gradient_clip_val=1.0
    )
    trainer.fit(module, fits.loader(), fits.loader())
    torch.save(trainer, io.BytesIO())
    again = pickle.loads(pickle.dumps(trainer)).strategy
    return (
        type(pickle.loads(pickle.dumps(bar))).__name__,
        len(pickle.dumps(module)) > 0,
        module.accuracy.distributed_available_fn is jit_distributed_available,
        "clip_grad_by_norm" in vars(trainer.precision_plugin),
        "_requires_distributed_sampler" in vars(trainer._data_connector),
        again.settings == trainer.strategy.settings,
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_a_fit_used_can_be_saved_after_it(ranks, num_ranks):
    found = ranks(num_ranks).run(save_after, num_ranks)
    assert found == [("TQDMProgressBar", True, True, False, False, True)] * num_ranks


def monitor_throughput(num_devices, folder):
    monitor = ThroughputMonitor(lambda batch: len(batch["x"]), window_size=2)
    logger = L.pytorch.loggers.CSVLogger(folder)
    trainer = make_trainer(num_devices, callbacks=[monitor], logger=logger, log_every_n_steps=1)
    trainer.fit(fits.Net(), fits.loader(), fits.loader())
    return [type(throughput).__name__ for throughput in monitor._throughputs.values()]


def test_lightnings_monitor_of_throughput_counts_a_batch_once(ranks, tmp_path):
    found = ranks(2).run(monitor_throughput, 2, str(tmp_path))
    assert found == [["PipelineThroughput"] * 2] * 2
    (table,) = tmp_path.rglob("metrics.csv")
    names, *rows = (line.split(",") for line in table.read_text().splitlines())
    rates = [dict(zip(names, row, strict=True)) for row in rows]
    found = [r for r in rates if r.get("train/samples_per_sec")]
    assert found
    assert all(r["train/samples_per_sec"] == r["train/device/samples_per_sec"] for r in found)


def profile(num_devices, folder, num_epochs):
    profiler = PyTorchProfiler(folder, "profile", profile_memory=True)
    trainer = fits.trainer(
        num_devices, profiler=profiler, num_sanity_val_steps=0, limit_train_batches=5,
        max_epochs=num_epochs, limit_val_batches=num_epochs - 1,
    )  # fmt: skip
    trainer.fit(fits.Net(), fits.loader(), fits.loader())
    actions = trainer.strategy.plan[num_devices - 1 - trainer.global_rank]  # the last is rank 0
    return [str(action) for action in actions if action.kind in COMPUTE]


@pytest.mark.parametrize("num_epochs", [1, slow(2)])
def test_torchs_profiler_writes_a_trace_of_each_rank(ranks, tmp_path, num_epochs):
    """Messages that are under way while its traces begin and end crash torch's profiler."""
    for rank, actions in enumerate(ranks(2).run(profile, 2, str(tmp_path), num_epochs)):
        traces = tmp_path.glob(f"fit-profile-{rank}-*training_step*.json")
        events = chain(*(json.loads(trace.read_text())["traceEvents"] for trace in traces))
        names = {event["name"] for event in events}
        assert names >= {*actions, "optimizer", "exchange"}
        assert any(name.startswith("wait ") for name in names)


def profile_predicting(num_devices, folder):
    profiler = PyTorchProfiler(folder, "profile")
    pipeline = {"data_parallel_size": 2}
    fits.trainer(num_devices, pipeline, profiler=profiler).predict(fits.Net(), fits.loader())


@pytest.mark.slow
def test_torchs_profiler_writes_traces_of_predictions_of_replicas(ranks, tmp_path):
    ranks(4).run(profile_predicting, 4, str(tmp_path))
    for rank in range(4):
        (trace,) = tmp_path.glob(f"predict-profile-{rank}-*predict_step*.json")
        names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
        assert any("predict_step" in name for name in names)


def test_a_metric_may_have_a_hook_that_cannot_be_copied():
    module, lock = fits.Net(), Lock()
    module.accuracy.register_forward_hook(lambda *args, lock=lock: None)
    module.accuracy.register_forward_pre_hook(partial(_ignore, lock))
    calls = MetricCalls(module)
    calls.start(0, is_trace=False)
    assert module.accuracy(torch.ones(2)) == 1
    calls.stop(has_failed=False)


def _ignore(*args):
    """Stand for what a profiler does."""


def count_open(num_devices):
    """Return the open files and threads of this process after each of a few fits."""
    counts = []
    gc.disable()  # a trainer and its module have each other
    try:
        for _ in range(12):
            fits.trainer(num_devices, max_steps=1).fit(fits.Net(dropout=0.0), fits.loader())
            counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    finally:
        gc.enable()
    return counts


def test_what_a_trainer_opens_serves_the_next_one(ranks):
    for _, second, *_, last in ranks(2).run(count_open, 2):
        # A thread of the run before may still end.
        assert all(now < before + 5 for before, now in zip(second, last, strict=True))
