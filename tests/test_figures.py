"""Every figure in README and docs/ that a command makes is that command's output."""

import contextlib
import io
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, Qwen2Config

from examples.benchmarks import packed_rows, sequence_slices
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


def page(name):
    return (ROOT / f"docs/{name}.md").read_text()


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
    after = [0.15 * 24 / bare["period"] for bare in without]
    yield f"makes `zb_h1` {percent(longer[0])} and `zb_v` {percent(longer[1])} longer"
    yield f"it would be {100 * after[0]:.0f} and {100 * after[1]:.0f} % after"


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
    text = page("consumer_gpus")
    words = text.partition("\npipeoffload-plan ")[2].partition("\n")[0]
    base, cells = 0.0, []
    for row in compared(words)["estimates"]:
        device, memory = max(row["memory"]["device"]), row["memory"]
        base = base or memory["parameters"][memory["device"].index(device)] / 2**30
        cells.append(f"{device / 2**30:.1f} | {percent(row['period_bubble'])}")
    yield f"| 7B | {base:.1f} | {cells[0]} | {cells[1]} |"


def blocks_computed_again(compared):
    text = page("memory")
    words = text.partition("\npipeoffload-plan model=gpt_tiny model.depth")[2].partition("\n")[0]
    rows = compared(f"model=gpt_tiny model.depth{words}")["estimates"]
    one, other = (max(row["memory"]["activations"]) / 2**20 for row in rows)
    yield f"at most {one:.1f} MiB of a rank under `1f1b`, and {other:.1f} MiB under `zb_v`"


HOST_OPTIMIZER = (
    "num_ranks=8 data.context=2048 strategy.recompute=full +trainer.precision=bf16-true "
    "+strategy.optimizer_offload=true +strategy.master_weights=float32 +model._target_=mine.Mine"
)


def write_models():
    """Write the program of the page of schedules, and what it needs of the models of two sizes."""
    program = re.search(r"```python\n(.*?class Mine.*?)```", page("schedules"), re.DOTALL)
    Path("mine.py").write_text(program[1])
    eight = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    LlamaConfig(**eight, **heads).save_pretrained("8B")
    large = {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64}
    heads = {"num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064}
    Qwen2Config(**large, **heads).save_pretrained("32B")


def all_weights_on_eight_cards(compared):
    write_models()
    words = f"{HOST_OPTIMIZER} data.batch_size=64 num_microbatches=64"
    rows = compared(f"{words} +model.folder=8B compare=[zb_v,1f1b]")["estimates"]
    chunked = "schedule=interleaved_1f1b num_chunks=4"
    rows.append(compared(f"{words} +model.folder=32B {chunked}"))
    shown = "8B | `zb_v`", "8B | `1f1b`", "32B | `interleaved_1f1b`, 4 stages a card"
    for name, row in zip(shown, rows, strict=True):
        memory = row["memory"]
        fullest = memory["device"].index(max(memory["device"]))
        parts = "parameters", "gradients", "activations", "messages", "device"
        sizes = (f"{memory[part][fullest] / 2**30:.1f}" for part in parts)
        yield f"| {name} | {' | '.join(sizes)} | {sum(memory['host']) / 2**30:.0f} |"


def an_eighth_of_8b(compared):
    write_models()
    words = "data.batch_size=16 num_microbatches=16 schedule=zb_h1 +model.folder=8B"
    memory = compared(f"{HOST_OPTIMIZER} {words}")["memory"]
    device, host = ([size / 2**30 for size in memory[name]] for name in ("device", "host"))
    yield (
        f"takes {min(device):.0f} to {max(device):.0f} GiB of its device and {min(host):.0f} to "
        f"{max(host):.0f} GiB of the host, {sum(host):.0f} GiB over all ranks"
    )


def printed_by(main, *words):
    lines = io.StringIO()
    with contextlib.redirect_stdout(lines):
        main(words)
    return lines.getvalue().splitlines()


def slices_of_sequences(compared):
    lines = printed_by(sequence_slices.main, "--microbatches", "2", "8")
    few, many, _, limited = (line for line in lines if re.match(r"\| \d", line))
    yield from (few, many, limited.replace("8 |", "8, in the memory of 2 microbatches |", 1))
    equal = printed_by(sequence_slices.main, "--microbatches", "8", "--equal")[3].split(" | ")[3]
    yield f"with 8 of them takes {equal.partition(',')[0]} instead of"


def packed_texts(compared):
    for line in printed_by(packed_rows.main)[2:]:
        yield line.removeprefix("| ").partition(" ")[2]


def idle_ranks(compared):
    rows = compared("", minibatch_balance.main)["ways"]
    for row in (row for row in rows if row["mode"] != "local_sort"):
        names = f"| {row['communication']} | {row['mode']} |"
        yield f"{names} {percent(row['idle'], 0)} | {row['speedup']:.2f} |"


@pytest.mark.parametrize(
    ("path", "lines"),
    [
        ("README.md", readme),
        slow(("docs/cluster.md", bubbles_by_size)),
        ("docs/gpu.md", bubbles_of_an_h200),
        ("docs/memory_reference.md", a_step_on_the_host),
        ("docs/memory_reference.md", copies_for_w),
        ("docs/consumer_gpus.md", cards_that_compute_all_the_time),
        slow(("docs/memory.md", blocks_computed_again)),
        slow(("docs/consumer_gpus.md", a_base_in_four_bits)),
        slow(("docs/consumer_gpus.md", all_weights_on_eight_cards)),
        slow(("docs/memory_reference.md", an_eighth_of_8b)),
        slow(("docs/schedules_reference.md", slices_of_sequences)),
        ("docs/on_demand.md", idle_ranks),
        slow(("docs/packed_rows.md", packed_texts)),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_the_page_has_what_the_command_prints(path, lines, compared, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.syspath_prepend(tmp_path)
    text = " ".join((ROOT / path).read_text().split())
    assert [line for line in lines(compared) if line not in text] == []
