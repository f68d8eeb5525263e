"""``pipeoffload-plan``: figures, tables, pictures, and refusals of one line."""

import json
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec

import pytest

from lightning_pipeoffload.cli import configuration
from lightning_pipeoffload.cli.configuration import run_hydra_app
from lightning_pipeoffload.plan import main, plan
from lightning_pipeoffload.schedule import Costs, ScheduleError, add_final_actions, build, simulate
from tests.support.composed import composed

CLIPS = "trainer.gradient_clip_val=1"


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Run pipeoffload-plan; return its exit status, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["pipeoffload-plan", *arguments])
        status = 0
        try:
            main()
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def printed(capsys):
    """Plan, and return what is printed."""

    def run(*overrides):
        plan(composed("plan", *overrides))
        return capsys.readouterr().out

    return run


@pytest.fixture
def figures(printed):
    """Plan, and return the figures."""
    return lambda *overrides: json.loads(printed(*overrides, "format=json"))


def test_json_has_the_figures_of_the_timeline_and_nothing_else(figures):
    timeline = simulate(build("zb_h2", 4, 8), Costs(1, 1, 1, communication=0.5))
    assert figures("schedule=zb_h2", "costs.communication=0.5") == {
        "schedule": "zb_h2",
        "num_ranks": 4,
        "num_chunks": 1,
        "num_microbatches": 8,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "bubble_unsynchronized": timeline.bubble_unsynchronized,
        "has_barrier": False,
        "period": 27,
        "period_bubble": pytest.approx(1 / 9),
        "peak_memory": [7, 7, 7, 7],
        "peak_host_memory": [0, 0, 0, 0],
        "messages": [8, 16, 16, 8],
        "copy_ratio": 0.0,
        "free_share": 1.0,
        "full_offload_is_free": True,
    }


TIGHT = ("num_ranks=2", "memory_limit=1", "costs.offload=0.5", "costs.reload=0.5")
COPIES = ("schedule=uniform", "costs.offload=1.05", "costs.reload=1.05")


@pytest.mark.parametrize("amount", ["offload=full", "strategy.offload=1.0"])
def test_offload_is_planned_and_reported(amount, figures):
    found = figures(*COPIES, amount)
    assert found["copy_ratio"] == pytest.approx(0.7)
    assert max(found["peak_memory"]) <= 4
    assert min(found["offloaded"]) > 0
    assert max(found["peak_host_memory"]) > 0


SLOW_COPIES = ("schedule=uniform", "costs.offload=3", "costs.reload=3")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            (*COPIES, "offload=half"),
            ["k 0.7: full offload is free\nrank 0: of 8 activations 8 leave from F to B\n"],
        ),
        (
            ("offload=full", "costs.offload=0.6", "costs.reload=0.6"),
            ["k 0.4: copies take no longer than computing, yet not all fit", "3 stay"],
        ),
        (
            ("schedule=uniform", "offload=half"),
            [
                "k 0: copies that take no time; costs.offload and",
                "rank 0: of 8 activations 8 leave",
            ],
        ),
        (
            (*SLOW_COPIES, "offload=full"),
            [
                "k 2: copies of at most 50.0 % of the activations are hidden",
                "stay: there is no time for more copies",
            ],
        ),
        (("schedule=auto", *TIGHT), ["Plans that fit: ", " taken", ": needs more"]),
        (("schedule=auto", "memory_limit=3"), ["Copies of a stage out and back", "k 1: "]),
        (("compare=[1f1b,zb_h2]", "memory_limit=4"), ["20.0 %", "zb_h2: memory_limit (4) is less"]),
        *(
            ((f"schedule={name}",), ["peak memory", "a step every", "\nrank 3 ...", "activations"])
            for name in ("gpipe", "interleaved_1f1b", "zb_v", "po_h")
        ),
        (("compare=[zb_v]",), ["activations"]),
    ],
)
def test_text_says(overrides, words, printed):
    found = printed(*overrides)
    in_one_line = " ".join(found.split())
    assert [word for word in words if word not in found and word not in in_one_line] == []


def test_plans_that_differ_in_postponed_weights_are_one_row(printed):
    found = printed("schedule=auto", "num_ranks=2", "num_microbatches=4", "costs.step=3")
    rows = re.findall(r"^ (\w.*?) +(\d+) +none ", found, re.MULTILINE)
    assert len(rows) > 5
    assert len(rows) == len({*rows})


@pytest.mark.parametrize("words", ["schedule=zb_h1", "schedule=auto", "compare=[zb_h1]"])
def test_what_was_measured_is_told_in_seconds_and_mebibytes(capsys, tmp_path, words):
    path = tmp_path / "costs.json"
    seconds = dict.fromkeys(("forward", "backward_input", "backward_weight"), 0.012345678)
    path.write_text(json.dumps({"costs": {**seconds, "activation": 2.2e9}}))
    plan(composed("plan", words, f"costs_file={path}"))
    printed = capsys.readouterr().out
    assert "MiB" in printed
    assert "e+" not in printed


def test_reductions_are_planned_where_they_take_time(figures, printed, tmp_path):
    path = tmp_path / "reduced.csv"
    add_final_actions(build("zb_h1", 4, 8)).to_csv(path)
    for schedule in ("schedule=zb_h1", f"strategy.schedule={path}"):
        assert figures(schedule, "costs.reduce=5", "offload=none")["makespan"] == 26 + 1 / 8 + 5
    found = printed("schedule=zb_h1", "costs.reduce=[0,0,0,3]")
    assert "alone 27.375 units" in found  # an eighth of it, after a tail of four W's
    assert "\nreduce " in found


def test_k_of_a_layer_comes_from_the_formula(figures):
    layer = ("layer.hidden_size=4096", "layer.sequence_length=8192")
    found = figures(*layer, "costs.forward=[1,2,3,4]")
    assert found["copy_ratio"] == pytest.approx(1.49, abs=0.01)


def test_costs_may_be_given_for_every_stage(figures):
    found = figures("costs.forward=[1,2,3,4]", "costs.activation=[4,3,2,1]")
    assert found["peak_memory"] == [16, 12, 8, 4]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("format=xml", r"format \(xml\) must be one of text, json"),
        ("costs=3", r"costs \(3\) must have names and values; use costs\.NAME=VALUE"),
        ("options=fast", r"options \(fast\) must have names and values"),
        ("+options.speed=3", "option 'speed' is unknown to schedule zb_h1"),
        ("num_chunks=2", r"num_chunks \(2\) must be 1 for zb_h1"),
        ("num_chunks=x", r"num_chunks \('x'\) must be a whole number"),
        ("num_ranks=", r"num_ranks \(''\) must be a whole number"),
        ("costs.forward=fast", r"costs\.forward \(fast\) must be a number"),
        ("costs.forward=[]", r"costs\.forward \(\[\]\) must be a number from 0 on"),
        ("costs.forward=1e308", r"costs\.forward \(1e\+308\) must be 0 or from 1e-100 to 1e\+100"),
        ("costs.forward=1e-320", r"costs\.forward \(1e-320\) must be 0 or from 1e-100"),
        ("layer.hidden_size=4096", "layer needs both hidden_size and sequence_length"),
        ("memory_limit=3", r"memory_limit \(3\) is less than the 4"),
        ("picture=plan.pdf", r"picture \(plan\.pdf\) must end in one of \.svg, \.png, \.json"),
        ("strategy.schedule=none.csv", r"strategy\.schedule \(none\.csv\) is no file"),
        ("compare=[fast]", "schedule 'fast' does not exist"),
        ("compare=5", "schedule '5' does not exist"),
        ("+costs.speed=3", r"costs\.speed is unknown; costs has forward, backward_input"),
        ("+costs.slices.x=1", r"costs\.slices\.x is unknown; costs\.slices has sizes, quadratic"),
        ("+layer.width=3", r"layer\.width is unknown; layer has hidden_size, sequence_length"),
        ("layer={hidden_size:many,sequence_length:8}", r"hidden_size \(many\) must be a number"),
        ("+options.costs=3", r"options\.costs is an argument of its own; set costs"),
        ("+model.width=32", r"model \(\{'width': 32\}\) names no class; add model=gpt_tiny or"),
        ("memory_limit=nan", r"memory_limit \(nan\) must be a number"),
        (
            "link=50GB",
            r"link \(50GB\) counts only with a device; add device=h100 and model=NAME, or",
        ),
        ("efficiency=0.4", r"efficiency \(0\.4\) counts only with a device; add device=h100"),
        ("devices_per_machine=4", r"devices_per_machine \(4\) counts only with a device; add"),
        (
            "strategy.memory_limit=4GiB",
            r"memory_limit \(4GiB\) is for runs; here set memory_limit, in",
        ),
        ("strategy.recompute=cheap", r"recompute \(cheap\) is for runs; here express it by"),
        ("+strategy.compile=true", r"strategy\.compile \(True\) is for runs; here leave it out"),
        (
            "+strategy.num_sequence_slices=8",
            r"slices \(8\) is for runs; here set num_sequence_slices, without strategy\.",
        ),
        ("+strategy.speed=3", r"strategy\.speed \(3\) is for runs; here leave it out"),
        ("strategy.offload=[0.5]", r"offload \(\[0\.5\]\) must be none, half"),
        ("schedule=auto num_ranks=2.5", r"num_ranks \(2\.5\) must be a whole number from 1 on"),
        ("schedule=auto num_ranks=[1,2]", r"num_ranks \(\[1, 2\]\) must be a whole number"),
        ("schedule=auto num_chunks=x", r"num_chunks \('x'\) must be a whole number"),
        ("schedule=auto memory_limit=abc", r"memory_limit \('abc'\) must be a number"),
        ("schedule=optpipe memory_limit=4GiB", r"memory_limit \('4GiB'\) must be a number"),
        ("schedule=optpipe offload=half", r"plans what it offloads by memory_limit; leave out"),
        ("model=gpt_tiny picture=a.svg", r"picture \(a\.svg\) shows times, and a model's shapes"),
        (
            "model=gpt_tiny memory_limit=4",
            r"memory_limit \(4\) is for a plan by costs; set device_memory",
        ),
        ("model=gpt_tiny +options.depth=2", r"options \(.*\) are for a plan by costs"),
        ("schedule=po_h offload=half", "po_h has copies of its own"),
        ("compare=[1f1b,grouped] offload=half", r"offload \(half\) is for one schedule"),
        (
            "compare=[1f1b,grouped] +options.group_size=3",
            r"options \(\{'group_size': 3\}\) are for one schedule",
        ),
        ("strategy.optimizer_sync=never", "must be one of barrier, post_validation"),
        ("picture.steps=2", r"picture\.steps \(2\) needs a file to draw"),
        ("picture.microbatches=0-1", "needs a file to draw: picture=FILE"),
        (
            "schedule=auto sweep=memory_limit picture=a.svg",
            r"picture \(a\.svg\) has no part in a sweep",
        ),
    ],
)
def test_what_cannot_be_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        plan(composed("plan", *words.split()))


def test_auto_takes_the_fastest_that_fits_and_says_what_it_has_tried(figures):
    found = figures("schedule=auto", *TIGHT)
    assert max(found["peak_memory"]) <= 1 < min(found["offloaded"])
    (taken,) = [c for c in found["candidates"] if c["fits"] and not c["reason"]]
    assert taken["schedule"] == found["schedule"]
    assert taken["makespan"] == pytest.approx(found["makespan"])
    without = figures("schedule=auto", "offload=none", *TIGHT)
    assert without["makespan"] > found["makespan"]
    assert {c["offload"] for c in without["candidates"]} == {"none"}


def test_auto_says_what_the_least_is(command):
    limit = "memory_limit=0.01"
    status, out, err = command("schedule=auto", "num_ranks=2", limit, "format=json")
    assert (status, out) == (2, "")
    assert "memory_limit (0.01) is less than any of" in err
    assert "use at least 0.25" in err


def test_a_schedule_is_read_from_a_file(figures, tmp_path):
    path = tmp_path / "mine.csv"
    build("1f1b", 3, 6).to_csv(path)
    found = figures(f"strategy.schedule={path}")
    assert (found["schedule"], found["num_ranks"], found["makespan"]) == ("mine", 3, 22)
    with pytest.raises(ScheduleError, match="less than the 3 that mine needs on rank 0"):
        figures(f"strategy.schedule={path}", "memory_limit=2")
    build("1f1b", 5, 6).to_csv(path)  # more ranks than num_ranks
    assert figures(f"strategy.schedule={path}", "memory_limit=5")["num_ranks"] == 5


@pytest.mark.parametrize("name", ["zb_v", "v", "1f1b"])
def test_a_comparison_has_the_figures_of_each_alone(name, figures):
    limit = 4 if name == "1f1b" else 3
    sizes = ("num_ranks=4", "num_microbatches=8", f"memory_limit={limit}")
    alone, compared = figures(f"schedule={name}", *sizes), figures(f"compare={name}", *sizes)
    assert (compared["num_ranks"], compared["num_microbatches"]) == (4, 8)
    (row,) = compared["compare"]
    assert {key: alone[key] for key in row} == row


def test_the_command_leaves_nothing_behind(command, tmp_path):
    status, out, err = command("format=json")
    assert (status, err) == (0, "")
    assert json.loads(out)["schedule"] == "zb_h1"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("speed=3", "Could not override 'speed'"),
        ("schedule=nonsense", "Could not find 'schedule/nonsense'"),
        ("costs.speed=3", "Could not override 'costs.speed'"),
        ("model.width=3", "'model.width': no model is chosen; add model=NAME, of gpt_small, gpt"),
        ("modle=gpt_tiny", "Could not override 'modle'; did you mean model?"),
        ("schedule=zbh1", "zb_v; did you mean schedule=zb_h1?"),
        (
            "trainer.limit_val_batches=2",
            "which this configuration leaves out; write +trainer.limit_val_batches=VALUE",
        ),
        ("trainer.limit_val_batchs=2", "did you mean +trainer.limit_val_batches?"),
        ("costs.forwrd=3", "Could not override 'costs.forwrd'; did you mean costs.forward?"),
        ("speed", "Error parsing override 'speed'"),
        ("num_ranks=0", "num_ranks (0) must be a whole number"),
        ("picture=a.svg picture.steps=0", "picture.steps (0) must be a whole number from 1"),
        ("schedule=interleaved_1f1b num_microbatches=6", "must be a multiple of num_ranks (4)"),
    ],
)
def test_a_refusal_is_status_2_and_one_line(command, argument, words):
    status, out, err = command(*argument.split())
    assert (status, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
    assert err.endswith("\n")


def test_an_unknown_name_lists_the_known_ones_and_no_paths(command):
    *_, err = command("offload=nonsense")
    assert err.endswith("Available options in 'offload': auto full half none\n")


@pytest.mark.parametrize("given", [{}, {"depth": 2}])
def test_arguments_of_a_demo_go_with_its_class(monkeypatch, given):
    own = [f"model.{name}={value}" for name, value in given.items()]
    arguments = ["model=gpt_tiny", "model._target_=my.Module", *own]
    monkeypatch.setattr(sys, "argv", ["pipeoffload-plan", *arguments])
    found = {}
    run_hydra_app("plan", lambda config: found.update(config.model))
    assert found == {"_target_": "my.Module", **given}


def test_a_refusal_leaves_out_the_drawing_of_the_place(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pipeoffload-plan"])

    def task(config):
        raise ScheduleError("rank 0, 0F0: a rule\nstep  rank 0\n")

    with pytest.raises(SystemExit):
        run_hydra_app("plan", task)
    assert capsys.readouterr().err == "rank 0, 0F0: a rule\n"


def test_full_errors_are_raised_where_they_are_wanted(command, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ScheduleError, match="num_ranks"):
        command("num_ranks=0")


def test_a_missing_hydra_is_one_line(command, monkeypatch):
    without = lambda name: None if name == "hydra" else find_spec(name)  # noqa: E731
    monkeypatch.setattr(configuration.importlib.util, "find_spec", without)
    status, _, err = command()
    assert status == 2
    assert err == "this command needs Hydra; pip install lightning-pipeoffload[hydra]\n"


def test_it_runs_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plan", "format=json"])
    monkeypatch.delitem(sys.modules, "lightning_pipeoffload.plan")
    runpy.run_module("lightning_pipeoffload.plan", run_name="__main__", alter_sys=True)
    assert json.loads(capsys.readouterr().out)["makespan"] == 27


WITHOUT_TORCH = """
import sys
import pipeoffload_commands
try:
    getattr(pipeoffload_commands, sys.argv.pop(1))()
finally:
    print({"torch", "lightning"} & sys.modules.keys(), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("name", "arguments", "status", "said"),
    [
        ("plan", ["schedule=zb_v", "num_ranks=4", "picture=p.svg", "format=json"], 0, "zb_v"),
        ("plan", ["--help"], 0, "memory_limit=[1,2,4] are the limits then"),
        ("train", ["--help"], 0, "optimizer_sync: barrier"),
        ("train", ["trainr=cpu"], 2, "did you mean trainer?"),
        ("rehearse", ["--help"], 0, "num_steps: 3"),
        ("odc", ["--help"], 0, "samples_per_rank: 4"),
    ],
)
def test_the_scripts_wait_for_no_torch(tmp_path, name, arguments, status, said):
    command = [sys.executable, "-c", WITHOUT_TORCH, name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == "set()"
    assert done.returncode == status
    assert said in done.stdout + done.stderr


def test_help_has_the_groups_that_the_command_uses(command):
    _, printed, _ = command("--help")
    groups = re.findall(r"^(\w+)=\w+   \(", printed, re.MULTILINE)
    assert groups == ["offload", "schedule", "model", "data", "trainer"]


def test_a_picture_has_all_that_are_compared_and_the_part_that_is_asked_for(command, tmp_path):
    arguments = ("compare=[1f1b,zb_h1]", "picture=a.svg", "picture.microbatches=0-1")
    assert command(*arguments)[0] == 0
    drawn = (tmp_path / "a.svg").read_text()
    assert "1f1b: 4 ranks" in drawn
    assert "zb_h1: 4 ranks" in drawn
    assert drawn.count(">units<") == 2


@pytest.mark.parametrize(
    ("given", "period"),
    [
        (["strategy.optimizer_sync=barrier"], 24),
        ([CLIPS], 27),
        (["+trainer.precision=16-mixed"], 27),
        ([CLIPS, "strategy.optimizer_sync=post_validation"], 24),
    ],
)
def test_the_period_is_told_as_steps_follow_each_other(given, period, printed, figures):
    words = "with a barrier" if period == 27 else "without a barrier"
    found = printed("schedule=zb_h2", *given)
    assert f"a step every {period} units {words} between steps" in found
    assert figures("compare=[zb_h2]", *given)["compare"][0]["period"] == period
    assert "alone" in printed("compare=[zb_h1,zb_h2]", *given)


def test_auto_chooses_by_the_period(figures):
    free, clipped = (figures("schedule=auto", "num_chunks=1", *given) for given in ([], [CLIPS]))
    assert (free["period"], clipped["period"]) == (24, 27)
    assert max(free["peak_memory"]) > max(clipped["peak_memory"])


def test_a_picture_shows_several_steps(command, tmp_path):
    assert command("schedule=zb_h2", "picture=a.svg", "picture.steps=3")[0] == 0
    drawn = (tmp_path / "a.svg").read_text()
    assert "a step every 24 units without a barrier between steps" in drawn
    assert ">23<" in drawn  # the last microbatch of three steps of eight


def test_a_solver_starts_from_the_best_of_all_cuts(figures, tmp_path):
    tight = "num_ranks=2", "num_microbatches=4", "memory_limit=2", "costs.offload=0.35"
    given = *tight, "costs.reload=0.35", "costs.copy_lanes=2"
    cache = f"+options.plan_cache={tmp_path}"
    solved = figures("schedule=optpipe", "+options.solver_seconds=1", cache, *given)
    assert solved["period"] <= figures("schedule=auto", *given)["period"] * (1 + 1e-9)
    assert max(solved["peak_memory"]) <= 2
