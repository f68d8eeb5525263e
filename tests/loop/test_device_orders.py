"""Which order of unlike devices is said to be better."""

from math import inf
from types import SimpleNamespace

import pytest

from lightning_pipeoffload.loop import device_orders
from lightning_pipeoffload.loop.device_orders import find_better_order
from lightning_pipeoffload.runtime.device import Device, Devices
from lightning_pipeoffload.schedule import ScheduleError


class CutCosts:
    """Costs of which the busiest rank takes as long as its place says."""

    limits = None

    def __init__(self, places=(0, 1, 2)):
        self.places = places

    def reordered(self, places):
        return CutCosts(places)

    def busiest_rank_seconds(self, option):
        return float(self.places[0])


def devices(*nodes, uuids=True):
    each = [Device(f"card {n}", f"u{n}" * uuids, node) for n, node in enumerate(nodes)]
    return Devices.of(each).with_slowness_from([1.0 + n for n in range(len(each))])


def better(monkeypatch, found, period, periods):
    """Return the better order where plans take ``periods`` by order, and others do not fit."""

    def make_plan(places):
        if places not in periods:
            raise ScheduleError("does not fit")
        return SimpleNamespace(best=SimpleNamespace(period=periods[places]))

    monkeypatch.setattr(device_orders, "make_plan", make_plan)
    return find_better_order(CutCosts(), found, lambda places, other: places, None, period)


@pytest.mark.parametrize(
    ("periods", "places"),
    [
        ({(1, 0, 2): 0.9, (2, 1, 0): 0.8}, (2, 1, 0)),
        ({(1, 0, 2): 0.98}, None),
        ({}, None),
    ],
)
def test_an_order_is_said_where_it_gains_enough(monkeypatch, periods, places):
    order = better(monkeypatch, devices("a", "a", "a"), 1.0, periods)
    assert (order and order.places) == places
    if order:
        assert order.gain == pytest.approx(0.2)
        assert order.line == "set CUDA_VISIBLE_DEVICES=GPU-u2,GPU-u1,GPU-u0"


def test_the_only_order_that_fits_is_said(monkeypatch):
    order = better(monkeypatch, devices("a", "a", "a", uuids=False), inf, {(0, 2, 1): 5.0})
    assert (order.places, order.gain) == ((0, 2, 1), 1.0)
    assert order.line == "give the devices in the order 0, 2, 1"


def test_machines_stay_whole(monkeypatch):
    periods = {(0, 2, 1): 0.1, (2, 0, 1): 0.5}
    order = better(monkeypatch, devices("a", "a", "b"), 1.0, periods)
    assert order.places == (2, 0, 1)
    assert order.line == "start the machines in the order b, a"


def test_of_alike_devices_there_is_one_order(monkeypatch):
    alike = Devices.of([Device("card", "u", "a")] * 3)
    assert better(monkeypatch, alike, 1.0, {(1, 0, 2): 0.1}) is None
