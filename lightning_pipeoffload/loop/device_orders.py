"""Another order of a run's unlike devices, which is faster or the only one in which a plan fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import inf
from typing import Any

from lightning_pipeoffload.loop.cut_costs import CutCosts
from lightning_pipeoffload.runtime.device import Device, Devices
from lightning_pipeoffload.schedule import PlanOption, PlanRequest, ScheduleError, make_plan

_WORTH_SAYING = 0.03  # of a period
_MOST_PLANNED = 12
_MOST_DEVICES = 8  # of more there are too many orders


@dataclass(frozen=True)
class BetterOrder:
    """An order of the devices.

    Attributes:
        places: The place at which each device is now, in the better order.
        gain: The share of a period that it is faster by; 1 where nothing else fits.
        line: What to write.
    """

    places: tuple[int, ...]
    gain: float
    line: str


def find_better_order(
    cut_costs: CutCosts,
    devices: Devices,
    request_in: Callable[[Sequence[int], CutCosts], PlanRequest],
    option: PlanOption,
    period: float = inf,
) -> BetterOrder | None:
    """Plan other orders, and return the best if it is worth a line.

    Args:
        cut_costs: The costs of cuts in the order of now.
        devices: The devices, in the order of now.
        request_in: Returns the request for an order, as places and costs.
        option: An option by whose cuts orders are compared before they are planned.
        period: Seconds of the plan of now; infinite where none fits.
    """
    promising: list[tuple[float, tuple[int, ...], CutCosts]] = []
    for places in _distinct_device_orders(devices, cut_costs.limits):
        other = cut_costs.reordered(places)
        try:
            promising.append((other.busiest_rank_seconds(option), places, other))
        except ScheduleError:  # too few blocks
            return None
    best, found = period, None
    for _, places, other in sorted(promising, key=lambda each: each[0])[:_MOST_PLANNED]:
        try:
            planned = make_plan(request_in(places, other)).best.period
        except ScheduleError:
            continue
        if planned is not None and planned < best:
            best, found = planned, places
    if found is None or best > period * (1 - _WORTH_SAYING):
        return None
    gain = 1.0 if period == inf else 1 - best / period
    return BetterOrder(found, gain, _line([devices.each[place] for place in found], found))


def _distinct_device_orders(
    devices: Devices, limits: Sequence[float] | None
) -> Iterator[tuple[int, ...]]:
    """Yield other orders, of alike devices one each; machines stay whole."""
    count = len(devices.each)
    if count > _MOST_DEVICES:
        return
    kinds = [*zip(devices.names, devices.slowness, limits or [0.0] * count, strict=True)]
    nodes = [*dict.fromkeys(device.node for device in devices.each)]
    by_node = [[p for p in range(count) if devices.each[p].node == node] for node in nodes]
    moved = by_node if len(nodes) > 1 else [[place] for place in range(count)]
    seen: set[tuple[Any, ...]] = {(*kinds,)}
    for order in permutations(moved):
        places = (*(place for group in order for place in group),)
        key = (*(kinds[place] for place in places),)
        if key not in seen:
            seen.add(key)
            yield places


def _line(ordered: Sequence[Device], places: Sequence[int]) -> str:
    nodes = [*dict.fromkeys(device.node for device in ordered)]
    if len(nodes) > 1:
        return f"start the machines in the order {', '.join(nodes)}"
    if all(device.uuid for device in ordered):
        uuids = (u if u.startswith("GPU-") else f"GPU-{u}" for u in (d.uuid for d in ordered))
        return f"set CUDA_VISIBLE_DEVICES={','.join(uuids)}"
    return f"give the devices in the order {', '.join(map(str, places))}"
