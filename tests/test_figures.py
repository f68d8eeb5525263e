"""Every figure in README and docs/ that a command makes is that command's output."""

import contextlib
import io
import json
import shlex
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from examples.benchmarks import packed_rows
from lightning_pipeoffload import plan
from lightning_pipeoffload.cli import minibatch_balance
from tests.support.pairs import slow

ROOT = Path(__file__).parents[1]
SHAPES_OF_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}


@pytest.fixture
def compared(monkeypatch, capsys):
    """Return what a command prints with ``format=json``."""

    def run(words, main=plan.main):
        monkeypatch.setattr(sys, "argv", ["pipeoffload-plan", *shlex.split(words), "format=json"])
        main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def percent(share, digits=1):
    return f"{100 * share:.{digits}f} %"


def readme(compared):
    text = (ROOT / "README.md").read_text()
    words = text.partition("`pipeoffload-plan compare=")[2].partition("`")[0]
    rows = compared(f"compare={' '.join(words.split())}")["compare"]
    assert len(rows) == 7
    for row in rows:
        step, alone, memory = row["period"], row["makespan"], max(row["peak_memory"])
        yield f"| `{row['schedule']}` | {step:g} | {alone:g} | {memory:g} |"


def bubbles_by_size(compared):
    for times in (1, 2, 4, 8):
        words = "compare=[1f1b,zb_h1,zb_v] num_ranks={} num_microbatches={}"
        sizes = [compared(words.format(p, times * p))["compare"] for p in (4, 8)]
        cells = [
            " and ".join(percent(row["bubble"]) for row in rows)
            for rows in zip(*sizes, strict=True)
        ]
        yield f"| {times if times > 1 else ''}p | {' | '.join(cells)} |"


def bubbles_of_an_h200(compared):
    costs = "costs.forward=15 costs.backward_input=17 costs.backward_weight=14"
    words = f"compare=[1f1b,zb_h1,zb_v] num_ranks=8 num_microbatches=32 {costs}"
    rows = compared(words)["compare"]
    of_each = ", ".join(f"{percent(row['bubble'])} (`{row['schedule']}`)" for row in rows)
    yield f"bubbles of {of_each}, {percent(rows[-1]['period_bubble'])} where no rank waits"


def a_step_on_the_host(compared):
    words = "compare=[zb_h1,zb_v] num_ranks=4 num_microbatches=8 costs.step={}"
    without, rows = (compared(words.format(step))["compare"] for step in (0, 0.15 * 24))
    longer = [row["period"] / bare["period"] - 1 for row, bare in zip(rows, without, strict=True)]
    behind = [0.15 * 24 / bare["period"] for bare in without]
    yield f"makes `zb_h1` {percent(longer[0])} and `zb_v` {percent(longer[1])} longer"
    yield f"it would be {100 * behind[0]:.0f} and {100 * behind[1]:.0f} % behind"


def copies_for_w(compared):
    costs = "costs.offload=0.75 costs.reload=0.75 costs.copy_lanes=2"
    rows = compared(f"compare=[zb_2p,zb_2p+full] num_ranks=8 num_microbatches=32 {costs}")
    most, least = (max(row["peak_memory"]) for row in rows["compare"])
    yield f"`zb_2p` keeps {least:g} activations of a stage instead of {most:g}"


def cards_that_compute_all_the_time(compared):
    words = "compare=[zb_v,1f1b] num_ranks=4 num_microbatches=16 costs.backward_weight=0"
    zb_v, other = (4 * (1 - row["bubble"]) for row in compared(words)["compare"])
    yield f"is at best {zb_v:.2f} times as fast, 1F1B {other:.2f} times"


def a_base_in_four_bits(compared):
    LlamaConfig(
        **SHAPES_OF_7B, num_attention_heads=32, num_key_value_heads=32, vocab_size=32000
    ).save_pretrained("FOLDER")
    text = (ROOT / "docs/consumer_gpus.md").read_text()
    words = text.partition("\npipeoffload-plan ")[2].partition("\n")[0]
    base, cells = 0.0, []
    for row in compared(words)["estimates"]:
        device, memory = max(row["memory"]["device"]), row["memory"]
        base = base or memory["parameters"][memory["device"].index(device)] / 2**30
        cells.append(f"{device / 2**30:.1f} | {percent(row['period_bubble'])}")
    yield f"| 7B | {base:.1f} | {cells[0]} | {cells[1]} |"


def blocks_computed_again(compared):
    text = (ROOT / "docs/memory.md").read_text()
    words = text.partition("\npipeoffload-plan model=gpt_tiny model.depth")[2].partition("\n")[0]
    rows = compared(f"model=gpt_tiny model.depth{words}")["estimates"]
    one, other = (max(row["memory"]["activations"]) / 2**20 for row in rows)
    yield f"at most {one:.1f} MiB of a rank under `1f1b`, and {other:.1f} MiB under `zb_v`"


def packed_texts(compared):
    lines = io.StringIO()
    with contextlib.redirect_stdout(lines):
        packed_rows.main([])
    for line in lines.getvalue().splitlines()[2:]:
        yield line.removeprefix("| ").partition(" ")[2]


def idle_ranks(compared):
    rows = compared("", minibatch_balance.main)["ways"]
    for row in (row for row in rows if row["mode"] != "local_sort"):
        names = f"| {row['communication']} | {row['mode']} |"
        yield f"{names} {percent(row['idle'], 0)} | {row['speedup']:.2f} |"


@pytest.mark.parametrize(
    ("page", "lines"),
    [
        ("README.md", readme),
        ("docs/cluster.md", bubbles_by_size),
        ("docs/gpu.md", bubbles_of_an_h200),
        ("docs/memory_reference.md", a_step_on_the_host),
        ("docs/memory_reference.md", copies_for_w),
        ("docs/consumer_gpus.md", cards_that_compute_all_the_time),
        slow(("docs/memory.md", blocks_computed_again)),
        slow(("docs/consumer_gpus.md", a_base_in_four_bits)),
        ("docs/on_demand.md", idle_ranks),
        slow(("docs/packed_rows.md", packed_texts)),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_the_page_has_what_the_command_prints(page, lines, compared, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    text = " ".join((ROOT / page).read_text().split())
    assert [line for line in lines(compared) if line not in text] == []
