"""One rank runs alone, with the plan's memory to the byte, and what it costs is written down."""

import json

import pytest

from lightning_pipeoffload.cli.rehearse import rehearse
from lightning_pipeoffload.plan import plan
from lightning_pipeoffload.schedule import ScheduleError
from tests.cli.test_model_estimate import LateGPT  # noqa: F401 - named in a configuration
from tests.support.composed import composed

SMALL = [
    *("model.width=32", "model.heads=2", "model.dropout=0", "data.context=32", "device=cpu"),
    *("data.batch_size=8", "trainer=cpu", "num_ranks=2", "num_microbatches=4", "num_steps=1"),
]


def rehearsed(capsys, *overrides):
    rehearse(composed("rehearse", *SMALL, *overrides, "format=json"))
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("rank", "overrides"),
    [
        (0, ["schedule=zb_h1"]),
        (1, ["schedule=po_f", "num_chunks=2"]),
        (0, ["schedule=zb_v"]),
        (0, ["schedule=zb_h1", "+trainer.precision=bf16-mixed"]),
    ],
    ids=["zb_h1", "po_f", "zb_v", "bf16-mixed"],
)
def test_a_rank_alone_keeps_what_its_plan_says(capsys, rank, overrides):
    found = rehearsed(capsys, f"rank={rank}", *overrides)
    assert found["peak_bytes"] == found["planned_peak_bytes"] > 0
    assert (found["host_bytes"] > 0) == ("schedule=po_f" in overrides)
    assert all(stage["backward_weight"] > 1e-5 for stage in found["stages"].values())
    assert found["step_seconds"] > 0.5 * found["planned_seconds"] > 0
    assert found["fits"]
    assert found["memory"]["activations"] == found["planned_peak_bytes"]


def test_a_module_made_in_configure_model_is_rehearsed(capsys):
    late = ["~model", f"+model._target_={__name__}.LateGPT", "+model.width=32"]
    others = [word for word in SMALL if not word.startswith("model.")]
    rehearse(composed("rehearse", *others, *late, "rank=1", "format=json"))
    found = json.loads(capsys.readouterr().out)
    assert found["peak_bytes"] == found["planned_peak_bytes"] > 0


def test_a_plan_is_made_with_what_was_measured(capsys, tmp_path):
    path = tmp_path / "costs.json"
    found = rehearsed(capsys, "schedule=zb_h1", f"costs_file={path}")
    sizes = ["num_ranks=2", "num_microbatches=4", "format=json"]
    plan(composed("plan", f"costs_file={path}", "schedule=auto", *sizes))
    planned = json.loads(capsys.readouterr().out)
    assert 0.2 < planned["makespan"] / found["planned_seconds"] < 5
    with pytest.raises(ScheduleError, match="pipeoffload-rehearse writes one"):
        plan(composed("plan", f"costs_file={path}.not"))
    path.write_text("[]")
    with pytest.raises(ScheduleError, match="has no costs in it"):
        plan(composed("plan", f"costs_file={path}"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rank=2"], r"rank \(2\) must be from 0 to 1"),
        (["schedule=auto"], "is chosen in a run"),
        (["num_steps=x"], r"num_steps \('x'\) must be a whole number from 1 on"),
        (["num_microbatches=3"], "cannot be cut into 3 equal microbatches"),
        (["device=nothing"], r"device \(nothing\) is no device"),
        (["strategy.memory_limit=1KiB"], "at least"),
        (["strategy.memory_limit=[1GiB]"], r"memory_limit=\['1GiB'\] has 1 entries; write 2"),
        (["device=meta"], r"device \(meta\) is not there; leave it out, or use device=cpu"),
        (["costs_file=nowhere/a.json"], "cannot be written: make the folder nowhere first"),
        (["+strategy.sharding=optimizer"], r"strategy.sharding \(optimizer\) changes nothing here"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(capsys, overrides, message):
    with pytest.raises(ValueError, match=message):
        rehearsed(capsys, *overrides)


def test_a_rank_keeps_the_limit_of_its_own_device(capsys):
    found = rehearsed(capsys, "rank=0", "strategy.memory_limit=[1GiB,2GiB]")
    assert found["limit_bytes"] == 2 << 30  # device 0 has the last stage
    hosts = "+strategy.host_memory_limit=[1KiB,1GiB]"
    half = "schedule=po_f", "num_chunks=2", hosts
    assert rehearsed(capsys, "rank=0", *half)["host_bytes"] > 1 << 10


def test_text_says_whether_it_fits(capsys):
    rehearse(composed("rehearse", *SMALL, "strategy.memory_limit=1GiB"))
    printed = " ".join(capsys.readouterr().out.split())
    assert "zb_h1: rank 0 of 2, 4 microbatches" in printed
    assert "of 1,024.00 MiB, planned were" in printed
    assert "it fits." in printed
