"""The plans of a run: chosen, made anew for larger microbatches, with the same bits by each."""

from unittest import mock

import lightning as L
import pytest
import torch

from lightning_pipeoffload.planning import measurements
from lightning_pipeoffload.runtime.device import ActionTimer
from lightning_pipeoffload.runtime.run import ActivationMemory
from lightning_pipeoffload.schedule import SCHEDULES, Kind
from tests.support import fits
from tests.support.auto_fits import (
    auto_and_by_hand,
    by_each,
    differences,
    fit,
    fit_levels,
    fit_twice,
)
from tests.support.pairs import slow
from tests.support.plans import WHOLE

SECONDS = {Kind.F: 1e-2, Kind.B: 1e-2, Kind.W: 1e-2, Kind.BW: 2e-2}


def median_action_seconds(timer, steps):
    """Stand for the timer's own method, so that plans do not depend on the machine."""
    done = {(action.kind, action.stage) for step in steps for action, *_ in step.actions}
    return {(kind, stage): SECONDS[kind] for kind, stage in done}


class Plans(L.Callback):
    """Notes by which plan each step ran."""

    def __init__(self):
        self.plans = []

    def on_train_batch_end(self, trainer, *args):
        self.plans.append(str(trainer.strategy.plan))


class Peaks(L.Callback):
    """Counts how often peaks of memory are forgotten, and notes it with each step."""

    def __init__(self):
        self.count, self.counts = 0, []

    def on_train_start(self, *args):
        self.counts.append(self.count)

    def on_train_batch_end(self, trainer, *args):
        self.counts.append(self.count)


def test_peaks_are_forgotten_as_the_first_measured_step_begins():
    peaks, forget = Peaks(), ActivationMemory.reset_peaks

    def count(memory):
        peaks.count += 1
        forget(memory)

    with mock.patch.object(ActivationMemory, "reset_peaks", count):
        trainer = fits.trainer(1, max_steps=2, limit_val_batches=0, callbacks=[peaks])
        trainer.fit(fits.Net(), fits.loader())
    assert peaks.counts == [0, 1, 1]


class Sequences(fits.Net):
    """Takes sequences of tokens."""

    def training_step(self, batch, batch_idx):
        hidden = self.embed(batch["x"])
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["x"])
        self.log("train_loss", loss)
        return loss


def fit_lengths(size, lengths, options):
    """Fit with sequences of so many tokens in each batch; return losses, plans and the report."""

    def make_batch(numbers):
        length = lengths[numbers[0] // 8]
        tokens = torch.tensor(numbers).unsqueeze(1).repeat(1, length) % 32
        return {"x": tokens, "names": [f"sample {number}" for number in numbers]}

    L.seed_everything(7, workers=True, verbose=False)
    record, plans = fits.Record(), Plans()
    trainer = fits.trainer(
        size, options, max_steps=len(lengths), limit_val_batches=0, callbacks=[record, plans]
    )
    numbers = range(8 * len(lengths))
    data = torch.utils.data.DataLoader(numbers, 8, collate_fn=make_batch)
    with (
        mock.patch.object(ActionTimer, "median_action_seconds", median_action_seconds),
        mock.patch.object(measurements, "measure_latencies", return_value={}),
    ):
        trainer.fit(Sequences(), data)
    return {"losses": record.losses, "plans": plans.plans, "report": trainer.strategy.report()}


@pytest.mark.parametrize(
    ("size", "form", "options"),
    [
        slow((2, "awkward", {"module": {"tie": True}})),
        slow((2, "wide", {"memory_limit": "200KiB", "num_microbatches": "auto"})),
        (2, "plain", {"num_microbatches": "auto", "data": {"batch_size": 2}}),
        slow((2, "late", {})),
        slow((4, "awkward", {"data_parallel_size": 2})),
        slow((2, "plain", {"num_chunks": 2, "trainer": {"accumulate_grad_batches": 2}})),
    ],
    ids=["tied", "limited", "two_microbatches", "configure_model", "replicas", "chunks"],
)
def test_weights_are_those_of_the_schedule_that_is_named(ranks, tmp_path, size, form, options):
    own, named = ranks(size).run(auto_and_by_hand, size, str(tmp_path), form, options)[0]
    assert differences(own, named) == []
    assert own["report"]["schedule"] in SCHEDULES


def test_another_trainer_chooses_anew(ranks):
    schedules, losses = ranks(2).run(fit_twice, 2)[0]
    assert {*schedules} <= {*SCHEDULES}
    assert losses == pytest.approx(fit_twice(1)[1], rel=1e-9)


@pytest.fixture(scope="module")
def wide(ranks, tmp_path_factory):
    """Return the report of a fit, and the folder of its plan."""
    folder = tmp_path_factory.mktemp("wide")
    options = {"plan_cache": str(folder / "plans")}
    found = ranks(2).run(fit, 2, str(folder / "a.ckpt"), "wide", options)
    return found[0]["report"], options


def test_the_report_says_what_was_tried(wide):
    report, _ = wide
    (taken,) = [c for c in report["candidates"] if c["fits"] and not c["reason"]]
    assert [taken[n] for n in ("schedule", "num_chunks")] == [
        report["schedule"],
        report["num_chunks"],
    ]
    assert {c["schedule"] for c in report["candidates"]} == {*WHOLE}
    assert taken["makespan"] == pytest.approx(report["makespan"])
    assert taken["peak_memory"] == max(report["peak_memory"]) > 100_000
    assert max(report["measured"]["peak_activation_bytes"]) == max(report["peak_memory"])


@pytest.mark.parametrize(("changed", "measures"), [({}, False), ({"recompute": "cheap"}, True)])
def test_a_second_start_of_the_same_run_measures_nothing(ranks, tmp_path, wide, changed, measures):
    before, options = wide
    report = ranks(2).run(fit, 2, str(tmp_path / "a.ckpt"), "wide", {**options, **changed})[0][
        "report"
    ]
    assert (len(report["candidates"]) > 1) is measures
    if not measures:
        for name in ("schedule", "num_chunks", "num_microbatches", "num_block_classes"):
            assert report[name] == before[name]
        assert [s["blocks"] for s in report["stages"]] == [s["blocks"] for s in before["stages"]]


def test_what_was_chosen_belongs_to_the_parameters_also_where_a_step_calls_the_blocks(
    ranks, tmp_path
):
    starts = [(2, 0), (3, 0), (2, 1)]  # a sanity check sees blocks before training does
    reports = ranks(2).run(fit_levels, 2, str(tmp_path), starts)[0]
    assert [len(report["candidates"]) > 1 for report in reports] == [True, True, False]


def test_no_block_is_computed_again_that_uses_what_the_step_writes(ranks, tmp_path):
    options = {"memory_limit": "1GiB"}
    report = ranks(2).run(fit, 2, str(tmp_path / "a.ckpt"), "counts", options)[0]["report"]
    assert not any(c["fits"] for c in report["candidates"] if c["recompute"] == "full")
    reasons = {c["reason"] for c in report["candidates"] if c["recompute"] == "full"}
    (reason,) = reasons
    assert reason.startswith("recompute=full: the step writes self.blocks.1.calls (")
    cheap = {c["reason"] for c in report["candidates"] if c["recompute"] == "cheap"}
    (reason,) = cheap  # the limit excludes nothing, so recomputation is not even measured
    assert reason.startswith("not measured: the memory limit leaves room for every plan")


def test_a_limit_that_is_too_small_is_refused_with_the_least(ranks, tmp_path):
    options = {"memory_limit": "10KiB", "recompute": "cheap"}
    with pytest.raises(Exception, match="than any of .* plans needs; use at least .* KiB"):
        ranks(2).run(fit, 2, str(tmp_path / "a.ckpt"), "wide", options)


@pytest.mark.parametrize(("form", "counts"), [("bare", {4, 8}), slow(("plain", {4}))])
def test_the_number_of_microbatches_is_chosen_too_where_nothing_depends_on_it(
    ranks, tmp_path, form, counts
):
    path, options = str(tmp_path / "a.ckpt"), {"num_microbatches": "auto"}
    report = ranks(2).run(fit, 2, path, form, options)[0]["report"]
    assert {c["num_microbatches"] for c in report["candidates"]} == counts
    assert report["num_microbatches"] in counts


def test_deterministic_training_takes_what_was_chosen_before(ranks, tmp_path, wide):
    before, options = wide
    path, deterministic = str(tmp_path / "a.ckpt"), {**options, "trainer": {"deterministic": True}}
    report = ranks(2).run(fit, 2, path, "wide", deterministic)[0]["report"]
    for name in ("schedule", "num_chunks", "num_microbatches"):
        assert report[name] == before[name]
    assert [s["blocks"] for s in report["stages"]] == [s["blocks"] for s in before["stages"]]


def test_deterministic_training_measures_nothing(ranks, tmp_path):
    options = {"trainer": {"deterministic": True}, "plan_cache": str(tmp_path)}
    report = ranks(2).run(fit, 2, str(tmp_path / "a.ckpt"), "plain", options)[0]["report"]
    assert report["schedule"] == "zb_h1"
    assert report["candidates"] == []


LIMIT = 12 * 2**20
SHORT, LONG = 256, 1024
LIMITED = {"schedule": "zb", "memory_limit": LIMIT}


def distinct_plans(result):
    return list(dict.fromkeys(result["plans"]))


def test_longer_sequences_keep_the_memory_limit_by_the_new_plan(ranks):
    found = ranks(2).run(fit_lengths, 2, [SHORT] * 6 + [LONG] * 6, LIMITED)[0]
    before, after = distinct_plans(found)[-2:]
    assert found["plans"][6] == before
    assert found["plans"].index(after) in (8, 9)  # every other batch is counted, and read one later
    report = found["report"]
    assert max(report["peak_memory"]) <= LIMIT
    assert report["measured"]["peak_activation_bytes"] == report["peak_memory"]


@pytest.mark.slow
def test_one_long_microbatch_among_short_ones_counts(ranks):
    lengths = [SHORT] * 4 + [LONG] + [SHORT] * 4
    found = ranks(2).run(fit_lengths, 2, lengths, LIMITED)[0]
    assert found["plans"][-1] != found["plans"][4]
    assert max(found["report"]["peak_memory"]) <= LIMIT


@pytest.mark.parametrize(
    "options", [{"memory_limit": "100MiB"}, slow({})], ids=["room", "no limit"]
)
def test_a_plan_that_keeps_its_limit_stays(ranks, options):
    options = {"schedule": "zb", **options}
    found = ranks(2).run(fit_lengths, 2, [SHORT] * 5 + [LONG] * 4, options)[0]
    assert len(set(found["plans"][3:])) == 1


PLANS = [
    {"schedule": "1f1b"},
    {"schedule": "zb_v"},
    {"schedule": "v_half", "optimizer_sync": "post_validation", "offload": "half"},
]


@pytest.mark.parametrize(
    ("size", "options", "plans"),
    [
        (2, {"trainer": {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}}, PLANS),
        slow((4, {"trainer": {"gradient_clip_val": 0.05}, "data_parallel_size": 2}, PLANS[1:])),
    ],
    ids=["accumulated", "replicas"],
)
def test_weights_do_not_depend_on_the_plan(ranks, tmp_path, size, options, plans):
    first, *others = ranks(size).run(by_each, size, str(tmp_path), options, plans)[0]
    for other in others:
        assert differences(first, other) == []
