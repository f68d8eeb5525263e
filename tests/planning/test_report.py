"""What the tables of a plan and of a measurement say."""

import logging
import threading

import pytest

from lightning_pipeoffload.planning import report
from lightning_pipeoffload.planning.report import (
    Progress,
    block_range_text,
    print_host_syncs,
    print_measurement,
    print_offload,
    print_prediction,
)
from lightning_pipeoffload.schedule import Costs, build, simulate


@pytest.mark.parametrize(
    ("names", "span"),
    [
        (["layers.3"], "layers.3"),
        (["model.layers.0", "model.layers.1", "model.layers.2"], "model.layers.0 .. 2"),
        (["layer1.0", "layer1.1", "layer2.0"], "layer1.0 .. layer2.0"),
        (["layer1.0", "layer2.0"], "layer1.0 .. layer2.0"),
        (["0", "1"], "0 .. 1"),
        (["model.model.transformer.h.0", "model.model.transformer.h.1"], "…transformer.h.0 .. 1"),
        (["encoder.layers.layer.0", "decoder.layers.layer.1"], "…layer.0 .. …layer.1"),
        (["a_module_of_a_very_long_name"], "a_module_of_…y_long_name"),
    ],
)
def test_a_stage_is_named_by_its_first_and_last_block(names, span):
    assert block_range_text(names) == span


REPORT = {
    "schedule": "1f1b",
    "num_ranks": 2,
    "num_chunks": 1,
    "num_replicas": 1,
    "num_microbatches": 4,
    "bubble": 0.2,
    "makespan": 0.5,
    "period": 0.5,
    "period_bubble": 0.2,
    "k": [0.5, 0.5],
    "free_share": 1.0,
    "peak_memory": [3 << 20, 2 << 20],
    "has_copies": False,
    "samples_per_second": 16.0,
}


def offloaded(**options):
    report = {"wanted": (4, 4), "offloaded": (3, 1), "queued": (0, 0), "reason": ""}
    return {**REPORT, "has_copies": True, "offload": {**report, **options}}


def test_each_line_that_reads_the_device_is_printed(capsys):
    print_host_syncs([{"part": "before blocks.0", "line": "a.py:3: if x[mask].all():"}])
    printed = " ".join(capsys.readouterr().out.split())
    assert printed == "The host waits for the device before blocks.0: a.py:3: if x[mask].all():"


@pytest.mark.parametrize(
    ("report", "limit", "said"),
    [
        (REPORT, 3 << 20, "Offloaded: nothing, order alone meets the limit."),
        (REPORT, 2 << 20, "Offloaded: nothing."),
        (offloaded(), None, "Offloaded: of 8 activations of a step 4 from F to B, 0 from B to W."),
        (offloaded(reason="too slow"), None, "100.0 % of the activations can be copied. too slow."),
        ({**REPORT, "has_copies": True}, None, "Offloaded: what 1f1b says. k = "),
        (REPORT, 2 << 20, "No plan fits the 2.00 MiB that every device has left"),
    ],
)
def test_what_is_offloaded_is_said(capsys, report, limit, said):
    print_offload(report, None if limit is None else [limit] * len(report["peak_memory"]))
    printed = " ".join(capsys.readouterr().out.split())
    assert said in printed
    assert ("No plan fits" in printed) == (limit == 2 << 20)
    assert ("k = " in printed) == report["has_copies"]


_TIMELINE = simulate(build("1f1b", 2, 4), Costs(0.1, 0.1, 0.1, activation=1 << 20))
PLANNED = _TIMELINE.peak_memory, _TIMELINE.bubble
MEASURED = {
    "step_seconds": [0.5],
    "bubble": [0.5],
    "between_steps": [0.125],
    "peak_activation_bytes": [1 << 20],
    "deferred_flops": [1],
    "weight_flops": [2],
}


@pytest.mark.parametrize("name", ["lightning_pipeoffload", "lightning_pipeoffload.report"])
def test_a_loggers_level_silences_the_tables(capsys, name):
    report = {**REPORT, "measured": MEASURED}
    print_measurement(report, *PLANNED)
    assert "500.0 ms" in capsys.readouterr().out
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(logging.WARNING)
    print_measurement(report, *PLANNED)
    log.setLevel(before)
    assert capsys.readouterr() == ("", "")


def test_a_handler_gets_a_table_as_text():
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    log = logging.getLogger("lightning_pipeoffload.report")
    log.addHandler(handler)
    print_measurement({**REPORT, "measured": MEASURED}, *PLANNED)
    log.removeHandler(handler)
    (record,) = records
    assert record.levelno == logging.INFO
    assert "500.0 ms" in record.getMessage()


def test_tables_fit_80_columns(capsys, monkeypatch, caplog):
    monkeypatch.setenv("COLUMNS", "80")
    caplog.set_level(logging.DEBUG, "lightning_pipeoffload.report")
    names = [f"base_model.model.transformer.h.{index}" for index in range(100)]
    stage = {"blocks": names, "num_parameters": 123_456_789_012}
    stages = [{**stage, "rank": 0}, {**stage, "rank": 1}]
    print_prediction({**REPORT, "k": None, "stages": stages, "peak_memory": [1234.5, 1234.5]})
    rows = [line for line in capsys.readouterr().out.splitlines() if "123,456,789,012" in line]
    assert len(rows) == 2  # none goes over two lines
    assert all("…transformer.h.0 .. 99" in row and "1234.5" in row for row in rows)
    large = {"step_seconds": [123.4], "peak_activation_bytes": [9_456 << 20]}
    print_measurement({**REPORT, "measured": {**MEASURED, **large}}, *PLANNED)
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "│ 9,456.00 MiB" in line]
    assert "123.4 s" in row
    assert "50.0 %" in row


def test_tokens_are_told_where_batches_have_some(capsys):
    print_measurement({**REPORT, "tokens_per_second": 8192.4, "measured": MEASURED}, *PLANNED)
    assert "16.0 samples/s, 8,192 tokens/s, a step" in " ".join(capsys.readouterr().out.split())


def test_the_bubble_is_explained(capsys):
    print_measurement({**REPORT, "measured": MEASURED}, *PLANNED)
    printed = " ".join(capsys.readouterr().out.split())
    assert "16.0 samples/s, a step" in printed
    # 1F1B idles for 0.3 of 1.5 seconds: a quarter of the time it works, which is half here.
    assert (
        "The bubble was predicted as 20.0 %, and is 50.0 %: 12.5 % by the plan with the measured "
        "times, 12.5 % between steps (data, optimizer, hooks, validation), 25.0 % waiting"
    ) in printed


@pytest.mark.parametrize("is_on", [True, False])
def test_what_takes_long_is_said_every_two_seconds(capsys, monkeypatch, is_on):
    seconds = iter([0.0, 1.0, 2.5, 3.0, 4.0, 5.0])
    monkeypatch.setattr(report.time, "monotonic", lambda: next(seconds))
    progress = Progress(is_on)
    for index in range(1, 6):
        progress.show(f"measuring {index} of 6")
    printed = capsys.readouterr().out
    shown = [index for index in range(1, 6) if f"measuring {index} of 6" in printed]
    assert shown == ([2, 5] if is_on else [])


@pytest.mark.parametrize("is_on", [True, False])
def test_one_long_trace_is_said_while_it_runs(monkeypatch, is_on):
    lines, is_printed = [], threading.Event()
    monkeypatch.setattr(report, "_SECONDS_SILENT", 0.0)
    monkeypatch.setattr(report, "print_line", lambda line: lines.append(line) or is_printed.set())
    with Progress(is_on).print_if_slow("tracing"):
        assert is_printed.wait(60 if is_on else 0) == is_on
    monkeypatch.setattr(report, "_SECONDS_SILENT", 60.0)
    with Progress(is_on).print_if_slow("tracing"):
        pass
    assert lines == ["tracing ..."] * is_on
