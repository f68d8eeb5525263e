"""What is planned before anything has run, and by what was measured."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch

from lightning_pipeoffload.planning.limits import (
    DeviceMemory,
    MachineLimits,
    parse_bytes,
    reserve_memory,
)
from lightning_pipeoffload.planning.run_plans import (
    build_first_schedule,
    make_plan_on_all_ranks,
    make_plan_with_advice,
    request_for_run,
)
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.runtime.device import Device
from lightning_pipeoffload.runtime.memory import HostBudget
from lightning_pipeoffload.schedule import (
    Costs,
    PlanRequest,
    ScheduleError,
    lower,
    options,
    peak_host_memory,
    peak_memory,
    validate,
)

MIB = 1 << 20
COSTS = Costs(0.01, 0.01, 0.01, activation=float(MIB), offload=0.005, reload=0.005)


def measured(costs=COSTS, num_ranks=4, limits=MachineLimits(), **options):  # noqa: B008
    return by_costs(PipelineSettings(**options), num_ranks, 8, costs, limits)


def by_costs(settings, num_ranks, count, costs, limits):
    request = PlanRequest(num_ranks, [settings.option(count)], lambda option: costs)
    plan = make_plan_with_advice(request_for_run(settings, request, limits))
    return plan.schedule, plan.report


def hosts(num_bytes, num_ranks=4):
    return [HostBudget.configured(num_bytes)] * num_ranks


@pytest.mark.parametrize("offload", [None, "half", 1.0])
def test_what_is_asked_for_is_offloaded_from_the_first_step(offload):
    asked = {} if offload is None else {"offload": offload}
    schedule, report = build_first_schedule(PipelineSettings(schedule="gis", **asked), 4, 8)
    assert schedule.has_copies == bool(asked)
    assert (report is None) != bool(asked)
    assert report is None or sum(report.offloaded) > 0


@pytest.mark.parametrize(
    ("options", "on_accelerator"), [({"memory_limit": "1GiB"}, False), ({}, True)]
)
def test_under_a_limit_the_first_steps_need_as_little_as_there_can_be(options, on_accelerator):
    settings = PipelineSettings(schedule="zb_2p", **options)
    schedule, _ = build_first_schedule(settings, 4, 8, on_accelerator)
    validate(schedule)
    assert max(peak_memory(schedule, COSTS)) == MIB


def test_a_limit_that_is_kept_anyway_costs_no_copies():
    schedule, report = measured(memory_limit="1GiB")
    assert not schedule.has_copies
    assert report is None


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "uniform"])
def test_a_tight_limit_is_met_by_offload(name):
    plain, _ = measured(schedule=name)
    limit = int(max(peak_memory(plain, COSTS))) - MIB
    schedule, report = measured(schedule=name, memory_limit=limit)
    assert schedule.has_copies
    assert max(report.peak_memory) <= limit


SLOW_COPIES = replace(COSTS, offload=0.1, reload=0.1)


@pytest.mark.parametrize(("costs", "copies"), [(COSTS, True), (SLOW_COPIES, False)])
def test_a_limit_is_kept_by_copies_or_by_order_whichever_is_faster(costs, copies):
    schedule, report = measured(costs, schedule="zb", memory_limit=3 * MIB)
    assert schedule.has_copies == copies == (report is not None)
    assert max(peak_memory(schedule, costs)) <= 3 * MIB


LEFT_FOR_W = replace(COSTS, weight_residue=3.0 * MIB)  # as where the backward computes F again


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b"])
def test_a_limit_is_kept_where_b_leaves_more_than_f_has(name):
    limit = int(max(peak_memory(measured(schedule=name)[0], LEFT_FOR_W)))
    schedule, _ = measured(LEFT_FOR_W, schedule=name, memory_limit=limit)
    assert max(peak_memory(lower(schedule), LEFT_FOR_W)) <= limit


@pytest.mark.parametrize(
    ("costs", "offload", "limit", "message"),
    [
        *(
            (LEFT_FOR_W, x, 4 * MIB, r"= 4\.00 MiB\) is less than the 5242880 bytes = 5")
            for x in ("none", 0.0)
        ),
        *(
            (
                COSTS,
                x,
                1024,
                r"memory_limit \(1024 bytes = 1\.00 KiB\) is less than the \d+ bytes = ",
            )
            for x in ("auto", "none", "full")
        ),
        (COSTS, "none", "1MB", r"\(1\.00 MB = 0\.96 MiB\) is less than the 4\.20 MB = 4\.00 MiB"),
        (COSTS, "none", "1MiB", r"\(1\.00 MiB\) is less than the 4\.00 MiB"),
    ],
)
def test_a_limit_that_nothing_keeps_is_refused(costs, offload, limit, message):
    with pytest.raises(ScheduleError, match=message):
        measured(costs, schedule="1f1b", offload=offload, memory_limit=limit)


@pytest.mark.parametrize("limit", [3 * MIB, MIB // 2, None])
def test_without_a_limit_the_devices_own_is_kept_as_far_as_can_be(limit):
    settings = PipelineSettings(schedule="1f1b")
    schedule, report = by_costs(
        settings, 4, 16, COSTS, MachineLimits(None if limit is None else [limit] * 4)
    )
    assert max(peak_memory(schedule, COSTS)) <= (3 if limit else 4) * MIB
    assert (report is None) == (limit is None)


@pytest.mark.parametrize("options", [{"offload": "full"}, {"memory_limit": 3 * MIB}])
def test_what_the_hosts_have_no_room_for_is_refused(options):
    _, report = measured(schedule="1f1b", **options)
    assert sum(report.offloaded) > 0
    limits = MachineLimits(hosts=hosts(MIB // 2))
    with pytest.raises(ScheduleError, match=r"rank 0 .* \d\.00 MiB of host .* is 0\.50 MiB; allow"):
        measured(schedule="1f1b", limits=limits, **options)


def test_what_just_fits_the_hosts_is_taken_and_the_pool_takes_whole_pieces():
    options = {"schedule": "1f1b", "offload": "full"}
    plan, _ = measured(**options)
    peaks = peak_host_memory(plan, COSTS)[::-1]  # the last rank is on device 0
    budgets = [HostBudget.configured(int(peak) or 1) for peak in peaks]
    assert measured(**options, limits=MachineLimits(hosts=budgets))[0] == plan
    costs = replace(COSTS, activation=1.9 * MIB)
    peak = int(max(peak_host_memory(measured(costs, **options)[0], costs)))
    with pytest.raises(ScheduleError, match="of host memory"):
        measured(costs, **options, limits=MachineLimits(hosts=hosts(peak)))


def test_a_limit_is_kept_by_order_where_the_hosts_have_no_room():
    options = {"schedule": "zb", "memory_limit": 3 * MIB}
    assert measured(**options)[0].has_copies
    schedule, report = measured(limits=MachineLimits(hosts=hosts(MIB // 2)), **options)
    assert report is None
    assert max(peak_memory(schedule, COSTS)) <= 3 * MIB


def test_where_nothing_fits_the_device_as_much_leaves_as_the_hosts_take():
    full, _ = measured(schedule="1f1b", limits=MachineLimits([MIB // 2] * 4))
    schedule, report = measured(
        schedule="1f1b", limits=MachineLimits([MIB // 2] * 4, hosts(3 * MIB))
    )
    assert max(peak_host_memory(full, COSTS)) > 3 * MIB
    assert 0 < max(peak_host_memory(schedule, COSTS)) <= 3 * MIB
    assert "or the hosts be full" in report.reason


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_schedule_with_copies_is_not_asked_for_others(num_ranks):
    settings = PipelineSettings(schedule="po_h", offload="full")
    with pytest.raises(ScheduleError, match="po_h has copies of its own"):
        settings.provisional_schedule(
            num_ranks
        )  # of which the launcher asks before it starts processes


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1024, 1024),
        ("1024", 1024),
        ("40GiB", 40 << 30),
        ("1.5 MiB", 3 << 19),
        ("2GB", 2_000_000_000),
        ("7 B", 7),
    ],
)
def test_an_amount_is_read(value, expected):
    assert parse_bytes(value) == expected


@pytest.mark.parametrize("value", [0, -1, "40 gigs", "GiB", "", "1..5GiB", "0GiB", True, 0.5])
def test_what_is_no_amount_is_refused(value):
    with pytest.raises(ValueError, match="is no amount of memory; use bytes"):
        parse_bytes(value)


def test_a_device_takes_what_it_does_not_have_yet(monkeypatch):
    made = []
    monkeypatch.setattr(torch, "empty", lambda size, **options: made.append(size))
    taken = [reserve_memory(torch.device("cuda"), missing) for missing in (500, 0, -1)]
    assert taken == [500, 0, 0]
    assert made == [500]


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([], 900),
        ([("node", "b")], 900),
        ([("other", "a")], 900),
        ([()], 900),
        ([("node", "a")], 0.9 * (600 // 2 + 400)),
        ([("node", "b"), ("node", "a"), ("node", "a")], 0.9 * (600 // 3 + 400)),
    ],
)
def test_ranks_on_one_device_share_what_is_free(others, expected):
    own = DeviceMemory(("node", "a"), 600, 400)
    of_all = [own, *(DeviceMemory(other, 700, 100) for other in others)]
    assert own.plannable_bytes(of_all) == int(expected)


def test_devices_without_a_uuid_are_each_a_ranks_own():
    own = DeviceMemory((), 600, 400)
    assert own.plannable_bytes([own, own]) == 900


def test_a_device_is_known_by_its_machine_and_uuid(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (600, 1024))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 400)
    for uuid, expected in (("GPU-1", ("node", "GPU-1")), ("", ())):
        known = Device("H200", uuid, "node", 1024)
        monkeypatch.setattr(Device, "of", lambda device, known=known: known)
        assert DeviceMemory.of(torch.device("cuda")) == (expected, 600, 400)
    assert DeviceMemory.of(torch.device("cpu")) is None


class Peer:
    """A process among several that plan, each in a thread."""

    def __init__(self, rank, sent, barrier):
        self.global_rank, self.world = rank, self
        self.num_processes = len(sent)
        self._sent, self._barrier = sent, barrier

    def gather(self, value):
        self._sent[self.global_rank] = pickle.dumps(value)
        self._barrier.wait()
        found = [pickle.loads(each) for each in self._sent]
        self._barrier.wait()
        return found


def planned_by(num_processes, request):
    """What each process returns."""
    sent, barrier = [None] * num_processes, Barrier(num_processes, timeout=60)

    def plan(rank):
        try:
            return make_plan_on_all_ranks(Peer(rank, sent, barrier), request)
        except ScheduleError as error:
            return str(error)

    with ThreadPoolExecutor(num_processes) as threads:
        return [*threads.map(plan, range(num_processes))]


@pytest.mark.parametrize(
    ("limit", "has_plan"), [(None, True), (int(5.5 * MIB), True), (int(0.2 * MIB), False)]
)
def test_any_number_of_processes_find_the_same_plan(limit, has_plan):
    def costs_of(option):
        again = {"none": 1.0, "full": 1.5}[option.recompute]
        kept = {"none": 4.0, "full": 1.0}[option.recompute] * MIB / option.num_chunks
        seconds = [work / option.num_chunks for work in (0.010, 0.011 * again, 0.008)]
        return Costs(*seconds, 1e-4, kept, weight_residue=kept * 0.9, offload=4e-3, reload=4e-3)

    wanted = options([6], recompute=["none", "full"])
    request = request_for_run(
        PipelineSettings(memory_limit=limit), PlanRequest(3, wanted, costs_of)
    )
    if not has_plan:
        [alone], *others = [{*planned_by(count, request)} for count in (1, 2, 5)]
        assert "use at least" in alone
        assert others == [{alone}] * 2
        return
    [alone], *others = [planned_by(count, request) for count in (1, 2, 5)]
    assert limit is None or len({candidate.offload for candidate in alone.candidates}) > 1
    for plan in (plan for plans in others for plan in plans):
        assert (plan.best, plan.schedule, plan.report) == (alone.best, alone.schedule, alone.report)
        assert [c.report_row() for c in plan.candidates] == [
            c.report_row() for c in alone.candidates
        ]


@pytest.mark.parametrize("limits", [{"offload": "full"}, {}])
def test_a_plan_that_is_made_anew_keeps_its_slices(limits):
    settings = PipelineSettings(schedule="seq_zb", num_sequence_slices=3, **limits)
    request = PlanRequest(4, [settings.option(8)], lambda option: COSTS)
    plan = make_plan_with_advice(request_for_run(settings, request))
    assert (plan.schedule.num_sequence_slices, plan.schedule.num_microbatches) == (3, 8)
