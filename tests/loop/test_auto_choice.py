"""``schedule="auto"`` measures without a trace, and trains as if its choice had been named."""

import pytest

from lightning_pipeoffload.schedule import SCHEDULES
from tests.support.auto_fits import auto_and_by_hand, differences, fit, fit_twice, resumed
from tests.support.pairs import slow


@pytest.mark.parametrize(
    ("size", "form", "options"),
    [
        (2, "awkward", {"module": {"tie": True}}),
        slow((3, "awkward", {"module": {"frozen": True}, "data": {"kind": "stream"}})),
        (2, "wide", {"memory_limit": "200KiB", "num_microbatches": "auto"}),
        slow((2, "averaging", {})),
        slow((2, "averaging", {"module": {"hook": True}})),
        slow((2, "bare", {"num_microbatches": "auto"})),
        slow((2, "late", {})),
        slow((4, "awkward", {"data_parallel_size": 2})),
        (2, "plain", {"num_chunks": 2, "trainer": {"accumulate_grad_batches": 2}}),
    ],
    ids=[
        "tied",
        "frozen and streamed",
        "limited",
        "averaging",
        "hook",
        "microbatches",
        "configure_model",
        "replicas",
        "chunks",
    ],
)
def test_weights_are_those_of_the_schedule_that_is_named(ranks, tmp_path, size, form, options):
    own, named = ranks(size).run(auto_and_by_hand, size, str(tmp_path), form, options)[0]
    assert differences(own, named) == []
    assert own["report"]["schedule"] in SCHEDULES


@pytest.mark.slow
def test_a_fit_goes_on_by_what_is_chosen(ranks, tmp_path):
    own, named = ranks(2).run(resumed, str(tmp_path))[0]
    assert len(own["losses"]) == 2
    assert differences(own, named) == []


def test_another_trainer_chooses_anew(ranks):
    schedules, losses = ranks(2).run(fit_twice, 2)[0]
    assert {*schedules} <= {*SCHEDULES}
    assert losses == pytest.approx(fit_twice(1)[1], rel=1e-9)


def test_the_report_says_what_was_tried(ranks, tmp_path):
    report = ranks(2).run(fit, 2, str(tmp_path / "a.ckpt"), "wide", {})[0]["report"]
    (taken,) = [c for c in report["candidates"] if c["fits"] and not c["reason"]]
    assert [taken[n] for n in ("schedule", "num_chunks")] == [
        report["schedule"],
        report["num_chunks"],
    ]
    assert {c["schedule"] for c in report["candidates"]} == {*SCHEDULES} - {"optpipe"}
    assert taken["makespan"] == pytest.approx(report["makespan"])
    assert taken["peak_memory"] == max(report["peak_memory"]) > 100_000
    assert max(report["measured"]["peak_activation_bytes"]) == max(report["peak_memory"])


def test_a_limit_that_is_too_small_is_refused_with_the_least(ranks, tmp_path):
    options = {"memory_limit": "10KiB", "recompute": "cheap"}
    with pytest.raises(Exception, match="than any of .* plans needs; use at least .* MiB"):
        ranks(2).run(fit, 2, str(tmp_path / "a.ckpt"), "wide", options)


@pytest.mark.parametrize(("form", "counts"), [("bare", {4, 8}), ("plain", {4})])
def test_the_number_of_microbatches_is_chosen_too_where_nothing_depends_on_it(
    ranks, tmp_path, form, counts
):
    path, options = str(tmp_path / "a.ckpt"), {"num_microbatches": "auto"}
    report = ranks(2).run(fit, 2, path, form, options)[0]["report"]
    assert {c["num_microbatches"] for c in report["candidates"]} == counts
    assert report["num_microbatches"] in counts


def test_deterministic_training_takes_what_was_chosen_before(ranks, tmp_path):
    path, options = str(tmp_path / "a.ckpt"), {"plan_cache": str(tmp_path / "plans")}
    before = ranks(2).run(fit, 2, path, "wide", options)[0]["report"]
    deterministic = {**options, "trainer": {"deterministic": True}}
    report = ranks(2).run(fit, 2, path, "wide", deterministic)[0]["report"]
    for name in ("schedule", "num_chunks", "num_microbatches"):
        assert report[name] == before[name]
    assert [s["blocks"] for s in report["stages"]] == [s["blocks"] for s in before["stages"]]


def test_deterministic_training_measures_nothing(ranks, tmp_path):
    options = {"trainer": {"deterministic": True}, "plan_cache": str(tmp_path)}
    report = ranks(2).run(fit, 2, str(tmp_path / "a.ckpt"), "plain", options)[0]["report"]
    assert report["schedule"] == "zb_h1"
    assert report["candidates"] == []
