"""Sequences in slices: units, where they are cut, what each costs and holds, and in what order."""

from dataclasses import replace
from itertools import pairwise

import pytest

from lightning_pipeoffload.schedule import (
    FAMILIES,
    Costs,
    Kind,
    MemoryLimitError,
    PlanRequest,
    Schedule,
    ScheduleError,
    Slices,
    accumulates_in_same_order,
    build,
    forward_only,
    keep_microbatches,
    lower,
    make_plan,
    offload_activations,
    options,
    peak_memory,
    serialize_microbatches,
    simulate,
    simulate_steps,
    slice_ends,
    validate,
)
from lightning_pipeoffload.schedule.simulation import memory_curves
from tests.support.plans import plan

SLICED = [name for name, recipe in FAMILIES.items() if recipe.can_slice]
# F of 8, of which 4 grow with the square; B of 10, of which 6; 2 of each run after the blocks.
UNEVEN = Costs(
    8,
    10,
    6,
    communication=4,
    activation=16,
    weight_residue=8,
    slices=Slices(
        (1, 3),
        quadratic_forward=0.5,
        quadratic_backward_input=0.6,
        end_forward=0.25,
        end_activation=0.25,
        key_values=0.25,
    ),
)


@pytest.mark.parametrize("name", SLICED)
@pytest.mark.parametrize(("p", "m", "n"), [(1, 1, 3), (2, 3, 2), (4, 2, 8), (3, 5, 4)])
def test_sliced_schedules_are_valid_as_are_all_that_passes_make_of_them(name, p, m, n):
    schedule = build(name, p, m, num_sequence_slices=n)
    sizes = schedule.num_microbatches, schedule.num_sequence_slices, schedule.num_units
    assert sizes == (m, n, m * n)
    fewer = keep_microbatches(schedule, 1)
    assert (fewer.num_microbatches, fewer.num_sequence_slices) == (1, n)
    alone = serialize_microbatches(schedule)
    for each in (schedule, fewer, alone):
        validate(lower(each))
    of_alone = max(peak_memory(alone, Costs.unit()))
    assert of_alone == pytest.approx(schedule.num_chunks)
    whole = forward_only(schedule)
    validate(lower(whole))
    assert (whole.num_microbatches, whole.num_sequence_slices) == (m, 1)
    again = Schedule.parse(str(schedule), num_sequence_slices=n)
    assert again == schedule != Schedule.parse(str(schedule))
    assert f"num_sequence_slices={n}" in repr(schedule)
    assert not accumulates_in_same_order(schedule, Schedule.parse(str(schedule)))


def test_one_slice_is_the_schedule_of_whole_sequences():
    for name, whole in {"seq_1f1b": "1f1b", "seq_zb": "zb_h1"}.items():
        assert build(name, 4, 6) == build(whole, 4, 6)


def test_the_first_rank_holds_a_microbatch_and_the_ranks_before_it():
    """In slices of a microbatch, p - 1 and its own s: 1F1B holds p whole microbatches."""
    for name in ("seq_1f1b", "seq_zb"):
        peaks = peak_memory(build(name, 8, 8, num_sequence_slices=8), Costs.unit())
        assert max(peaks) == pytest.approx((8 - 1 + 8) / 8)
    few = simulate(build("seq_zb", 8, 2, num_sequence_slices=8), Costs.unit())
    assert few.makespan < 0.5 * simulate(build("zb_h1", 8, 2), Costs.unit()).makespan


@pytest.mark.parametrize("name", ["seq_zb", "seq_v"])
def test_a_search_keeps_any_limit_from_one_microbatch_on_and_more_memory_is_no_slower(name):
    chunks = FAMILIES[name].num_chunks
    costs = replace(UNEVEN_4, activation=1 / chunks, weight_residue=0.6 / chunks)
    spans = []
    for limit in (1.3, 1.6, 2.2, 3.0, 4.0):
        found = build(name, 4, 6, costs=costs, memory_limit=limit, num_sequence_slices=4)
        timeline = simulate(found, costs)
        assert max(timeline.peak_memory) <= limit * (1 + 1e-9)
        spans.append(round(max(timeline.span), 9))
    assert spans == sorted(spans, reverse=True)
    assert spans[-1] < 0.9 * spans[0]
    with pytest.raises(MemoryLimitError, match=rf"that one microbatch needs; .* for {name}"):
        build(name, 4, 6, costs=costs, memory_limit=0.9, num_sequence_slices=4)


def test_on_a_v_two_microbatches_fill_eight_ranks():
    costs = Costs(0.5, 0.5, 0.5, activation=0.5)
    found = build("seq_v", 8, 2, costs=costs, num_sequence_slices=8)
    assert simulate(found, costs).makespan < 1.15 * 2 * 3
    assert simulate(build("zb_v", 8, 2, costs=costs), costs).makespan > 1.8 * 2 * 3


FAULTS = {
    "forwards out of order": (
        "0F1 0F0 0BW1 0BW0",
        "rank 0, 0F1: a microbatch's forwards run in order of its 2 slices; 0F0 comes first",
    ),
    "backwards not in reverse": (
        "0F0 0F1 0BW0 0BW1",
        "rank 0, 0BW0: a microbatch's backwards run in reverse of its 2 slices; 0BW1 comes first",
    ),
    "B before the last slice's F": (
        "0F0 0B0 0W0 0F1 0B1 0W1",
        "rank 0, 0B0: a microbatch's backwards run in reverse of its 2 slices; 0B1 comes first",
    ),
    "a microbatch without its last slice": (
        "0F0 0F1 0F2 0BW1 0BW0 0BW2",
        "rank 0: stage 0 has nothing for unit 3",
    ),
    "a deadlock": (
        "0F0 0F1 0BW1 0BW0 0F2 0F3 0BW3 0BW2\n1F0 1F1 1F2 1F3 1BW1 1BW0 1BW3 1BW2",
        "rank 0 is at 0BW1 and waits for 1B1; rank 1 is at 1F2 and waits for 0F2",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault):
    text, message = FAULTS[fault]
    with pytest.raises(ScheduleError, match=message):
        validate(plan(text, num_sequence_slices=2))


def test_weights_may_come_in_any_order_and_microbatches_between_each_other():
    validate(plan("0F0 0F2 0F1 0B1 0F3 0B0 0B3 0W0 0W1 0B2 0W2 0W3", num_sequence_slices=2))


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (
            lambda: build("zb_v", 2, 4, num_sequence_slices=4),
            r"num_sequence_slices \(4\) must be 1 for zb_v, which runs whole sequences; use that, "
            "or schedule=seq_1f1b, seq_zb, seq_v",
        ),
        (lambda: build("seq_zb", 2, 4, num_sequence_slices=0), r"num_sequence_slices \(0\) must"),
        (lambda: plan("0F0 0BW0", num_sequence_slices=0), r"num_sequence_slices \(0\) must be"),
        (
            lambda: build("seq_zb", 2, 4, num_sequence_slices=2).to_csv("no.csv"),
            "seq_zb has 2 slices of each sequence, which torch's format cannot say",
        ),
        (lambda: simulate(plan("0F0 0F1 0BW1 0BW0", num_sequence_slices=2), OF_THREE), "has 3 val"),
        (lambda: Slices(key_values=1.5), r"slices.key_values \(1.5\) must be from 0 to 1"),
        (lambda: Slices((1, 0)), r"slices.sizes \(\(1, 0\)\) must be numbers above 0"),
        (lambda: slice_ends(7, 4), r"\(4\) leaves less than 2 of 7 tokens .* use at most 3"),
    ],
)
def test_what_cannot_be_is_refused(refused, message):
    with pytest.raises(ScheduleError, match=message):
        refused()


OF_THREE = Costs(1, 1, 1, slices=Slices((1, 1, 1)))
UNEVEN_4 = Costs(1, 1, 1, slices=Slices((4, 3, 2, 2), 0.4, 0.5, key_values=0.1))


def test_equal_cuts_where_all_costs_are_linear_and_shorter_later_slices_for_attention():
    assert slice_ends(32, 4) == (8, 16, 24, 32)
    assert slice_ends(10, 4) == (2, 5, 8, 10)
    assert slice_ends(8, 4, 1.0, 1e6) == (2, 4, 6, 8)
    linear, quadratic = 3.0, 5.0
    ends = slice_ends(2**20, 8, linear, quadratic)
    done = [linear * x + quadratic * x**2 for x in (end / 2**20 for end in (0, *ends))]
    costs = [after - before for before, after in pairwise(done)]
    assert costs == pytest.approx([1.0] * 8, rel=1e-5)
    assert ends[0] > 2**20 / 8 > ends[-1] - ends[-2]


def test_a_slice_costs_its_linear_part_its_share_of_the_square_and_what_is_after_the_blocks():
    timeline = simulate(plan("0F0 0F1 0B1 0B0 0W0 0W1", num_sequence_slices=2), UNEVEN)
    seconds = {str(e.action): e.end - e.start for e in timeline.events}
    assert seconds == pytest.approx(
        {
            "0F0": 8 * (0.25 / 4 + 0.5 / 16),
            "0F1": 8 * (0.25 * 3 / 4 + 0.5 * 15 / 16 + 0.25),
            "0B0": 10 * (0.4 / 4 + 0.6 / 16),
            "0B1": 10 * (0.4 * 3 / 4 + 0.6 * 15 / 16),
            "0W0": 6 / 4,
            "0W1": 6 * 3 / 4,
        }
    )
    assert timeline.makespan == pytest.approx(8 + 10 + 6)
    linked = simulate(plan("0F0 0F1 0BW1 0BW0\n1F0 1F1 1BW1 1BW0", num_sequence_slices=2), UNEVEN)
    ends = {str(e.action): e for e in linked.events}
    assert ends["1F0"].start == pytest.approx(ends["0F0"].end + 1)  # a quarter of the message's 4
    assert ends["0BW1"].start == pytest.approx(ends["1BW1"].end + 3)


def test_keys_and_values_stay_from_f_to_b_and_their_gradients_from_the_first_b_on():
    schedule = plan("0F0 0F1 0B1 0B0 0W1 0W0", num_sequence_slices=2)
    (curve,) = memory_curves(simulate(schedule, UNEVEN), UNEVEN)
    # Of the activation 16: 12 in the slices, of which 4 are keys and values; 4 after the blocks.
    # B leaves a residue of 8, and as long as the first slice's B has not run, a gradient of 1.
    memory = [held for _, held in curve if held]
    assert memory == pytest.approx([3, 16, 3 + 1 + 6, 6 + 2, 2])
    assert max(peak_memory(schedule, UNEVEN)) == pytest.approx(16)


def test_keys_and_values_are_not_offloaded():
    text = "0F0 0F1 0F2 0F3 0B1 0B0 0B3 0B2 0W1 0W0 0W3 0W2"
    costs = Costs(1, 1, 1, activation=8, offload=0.1, reload=0.1, slices=Slices(key_values=0.25))
    schedule = plan(text, num_sequence_slices=2)
    needed = max(peak_memory(schedule, costs))
    assert needed == pytest.approx(16 + 1)  # one slice's gradient of keys and values
    offloaded, report = offload_activations(schedule, costs, "full")
    validate(lower(offloaded))
    assert offloaded.num_sequence_slices == 2
    assert max(report.peak_memory) < needed
    timeline = simulate(offloaded, costs)
    (curve,) = memory_curves(timeline, costs)
    end = max(event.end for event in timeline.events if event.action.kind is Kind.F)
    assert min(held for time, held in curve if 1 < time < end) >= 2  # those of the slices so far
    for limit in (16, 12, 10):
        kept, report = offload_activations(schedule, costs, "auto", limit)
        assert max(peak_memory(kept, costs)) <= limit * (1 + 1e-9)
    with pytest.raises(ScheduleError, match="memory_limit"):
        offload_activations(schedule, costs, "auto", 4)  # as much as keys and values alone


def test_steps_number_their_units_on():
    schedule = build("seq_zb", 2, 3, num_sequence_slices=4)
    timeline = simulate_steps(schedule, Costs.unit(), num_steps=2, has_barrier=False)
    assert timeline.num_sequence_slices == 4
    assert {e.action.microbatch for e in timeline.events} == {*range(2 * 12)}


def test_auto_chooses_among_families_with_slices_where_their_number_is_given_and_only_then():
    assert {o.schedule for o in options([2])}.isdisjoint(SLICED)
    wanted = options([2], num_sequence_slices=4)
    assert {option.schedule for option in wanted} == {*SLICED}
    for has_barrier in (lambda option: True, lambda option: False):
        request = PlanRequest(4, wanted, lambda option: UNEVEN_4, has_barrier=has_barrier)
        plan = make_plan(request)
        assert plan.schedule.num_sequence_slices == 4
        assert plan.best.period == min(c.period for c in plan.candidates if c.fits)
        whole = make_plan(PlanRequest(4, options([2]), lambda option: Costs(1, 1, 1)))
        assert plan.best.period < 0.7 * whole.best.period


def test_a_plan_with_slices_keeps_them_under_copies_and_postponed_weights():
    wanted = options([3], num_sequence_slices=4)
    costs = replace(UNEVEN_4, offload=0.3, reload=0.3, step=1.0)
    for more in ({"memory_limit": 0.9}, {"steps_early": True}, {"offload": "half"}):
        plan = make_plan(PlanRequest(4, wanted, lambda option: costs, **more))
        assert (plan.schedule.num_sequence_slices, plan.schedule.num_microbatches) == (4, 3)
        validate(lower(plan.schedule))
