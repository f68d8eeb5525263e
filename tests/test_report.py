import pytest

from lightning_pipeoffload.report import span_of


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
