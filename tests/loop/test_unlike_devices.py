"""Fits over ranks that are not alike: in speed, as blocks that sleep, and in memory."""

import os
import time
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_pipeoffload.runtime.device import Device
from lightning_pipeoffload.runtime.measure import device_speed
from tests.support import fits
from tests.support.auto_fits import MODULES, fit
from tests.support.pairs import slow


class Sleeping(nn.Module):
    """A block that takes three times as long on the second device."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        if dist.is_initialized() and dist.get_world_size() > 1:
            time.sleep((0.01, 0.03)[dist.get_rank()])
        return x + torch.tanh(self.linear(x))


class Slow(fits.Net):
    def __init__(self):
        super().__init__(depth=0)
        self.blocks = nn.ModuleList(Sleeping() for _ in range(8))
        self.double()


def fit_slow(num_devices):
    L.seed_everything(7, workers=True, verbose=False)
    record = fits.Record()
    trainer = fits.trainer(
        num_devices, {"schedule": "auto"}, max_steps=2, limit_val_batches=0, callbacks=[record]
    )
    trainer.fit(Slow(), fits.loader())
    return record.losses, trainer.strategy.report()


def test_a_device_that_is_three_times_as_slow_has_fewer_blocks(ranks):
    (losses, report), *_ = ranks(2).run(fit_slow, 2)
    plain, _ = fit_slow(1)
    assert losses == plain
    by_device = {each["device"]: rank for rank, each in enumerate(report["devices"])}
    counts = [
        sum(len(stage["blocks"]) for stage in report["stages"] if stage["rank"] == by_device[place])
        for place in range(2)
    ]
    assert counts[0] > counts[1]
    slowness = [report["devices"][by_device[place]]["slowness"] for place in range(2)]
    assert slowness[0] == 1.0
    assert slowness[1] > 1.5


@pytest.mark.parametrize(
    ("size", "limits"),
    [(2, ["600KiB", "70KiB"]), slow((3, ["200KiB", "400KiB", "600KiB"]))],
)
def test_each_device_keeps_its_own_memory_limit(ranks, tmp_path, size, limits):
    path, options = str(tmp_path / "a.ckpt"), {"memory_limit": limits}
    report = ranks(size).run(fit, size, path, "wide", options)[0]["report"]
    planned, measured = report["peak_memory"], report["measured"]["peak_activation_bytes"]
    assert measured == planned
    for each, peak in zip(report["devices"], planned, strict=True):
        assert each["memory_limit"] == int(limits[each["device"]].removesuffix("KiB")) << 10
        assert peak <= each["memory_limit"]


def test_a_limit_that_fits_nothing_names_the_device(ranks, tmp_path):
    options = {"memory_limit": ["600KiB", "10KiB"], "recompute": "cheap"}
    with pytest.raises(Exception, match=r"memory_limit .* of rank \d, on device 1, is less than"):
        ranks(2).run(fit, 2, str(tmp_path / "a.ckpt"), "wide", options)


def fit_named(num_devices, form, folder):
    """Fit where the second device has another name, and takes three times as long by a product."""
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("LOCAL_RANK", 0))

    def describe(cls, device):
        return cls(("fast", "slow")[rank], "", "here")

    def seconds_of_product(device):
        return (1.0, 3.0)[rank]

    with (
        mock.patch.object(Device, "of", classmethod(describe)),
        mock.patch.object(device_speed, "_time_matmul", seconds_of_product),
    ):
        L.seed_everything(7, workers=True, verbose=False)
        options = {"schedule": "zb_h1", "plan_cache": folder}
        trainer = fits.trainer(num_devices, options, max_steps=1, limit_val_batches=0)
        trainer.fit(MODULES[form](), fits.loader())
    return trainer.strategy.report()


@pytest.mark.parametrize("form", ["plain", "late"])
def test_the_first_cut_goes_by_a_product_where_names_differ(ranks, tmp_path, form):
    report = ranks(2).run(fit_named, 2, form, str(tmp_path))[0]
    assert [each["name"] for each in report["devices"]] == ["slow", "fast"]
    assert [each["slowness"] for each in report["devices"]] == [3.0, 1.0]
    assert [len(stage["blocks"]) for stage in report["stages"]] == [2, 6]
