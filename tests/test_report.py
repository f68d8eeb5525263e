import pytest

from lightning_pipeoffload.report import print_offload, span_of


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
