import logging

import pytest

from lightning_pipeoffload.planning.report import print_measurement, print_offload, span_of


@pytest.mark.parametrize(
    ("names", "span"),
    [
        (["layers.3"], "layers.3"),
        (["model.layers.0", "model.layers.1", "model.layers.2"], "model.layers.0 .. 2"),
        (["layer1.0", "layer1.1", "layer2.0"], "layer1.0 .. layer2.0"),
        (["layer1.0", "layer2.0"], "layer1.0 .. layer2.0"),
        (["0", "1"], "0 .. 1"),
    ],
)
def test_a_stage_is_named_by_its_first_and_last_block(names, span):
    assert span_of(names) == span


REPORT = {
    "schedule": "1f1b",
    "num_ranks": 2,
    "num_chunks": 1,
    "num_microbatches": 4,
    "bubble": 0.2,
    "k": [0.5, 0.5],
    "free_share": 1.0,
    "peak_memory": [3 << 20, 2 << 20],
}


@pytest.mark.parametrize(("limit", "said"), [(None, False), (3 << 20, False), (2 << 20, True)])
def test_a_plan_that_a_device_may_be_too_small_for_is_said(capsys, limit, said):
    print_offload(REPORT, limit)
    printed = " ".join(capsys.readouterr().out.split())
    assert ("No plan fits the 2.00 MiB that every device has left" in printed) == said


MEASURED = {
    "step_seconds": [0.5],
    "bubble": [0.25],
    "peak_activation_bytes": [1 << 20],
    "deferred_flops": [1],
    "weight_flops": [2],
}


@pytest.mark.parametrize("name", ["lightning_pipeoffload", "lightning_pipeoffload.report"])
def test_a_loggers_level_silences_the_tables(capsys, name):
    report = {**REPORT, "measured": MEASURED}
    print_measurement(report)
    assert "500.0 ms" in capsys.readouterr().out
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(logging.WARNING)
    print_measurement(report)
    log.setLevel(before)
    assert capsys.readouterr() == ("", "")


def test_a_handler_gets_a_table_as_text():
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    log = logging.getLogger("lightning_pipeoffload.report")
    log.addHandler(handler)
    print_measurement({**REPORT, "measured": MEASURED})
    log.removeHandler(handler)
    (record,) = records
    assert record.levelno == logging.INFO
    assert "500.0 ms" in record.getMessage()
