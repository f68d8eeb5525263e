import pytest

from lightning_pipeoffload.pictures.drawing import ink_on, lighter


@pytest.mark.parametrize(("share", "mixed"), [(0, "#204060"), (0.5, "#90a0b0"), (1, "#ffffff")])
def test_white_is_mixed_in(share, mixed):
    assert lighter("#204060", share) == mixed


@pytest.mark.parametrize(
    ("color", "ink"), [("#000000", "#ffffff"), ("#ffffff", "#111111"), ("#ffff00", "#111111")]
)
def test_ink_is_readable(color, ink):
    assert ink_on(color) == ink
