import pytest
from matplotlib.image import imread

from lightning_pipeoffload.pictures.drawing import Area, Box, Drawing, Words
from lightning_pipeoffload.pictures.png import write_png


@pytest.fixture
def image(tmp_path):
    """A drawing of 100 by 50 as pixels."""

    def write(**parts):
        write_png(Drawing(100, 50, **parts), tmp_path / "a.png", sharpness=1)
        return imread(tmp_path / "a.png")

    return write


def test_a_box_is_where_and_what_it_is(image):
    pixels = image(boxes=[Box(10, 20, 30, 10, "#ff0000")])
    assert pixels.shape[:2] == (50, 100)
    assert tuple(pixels[25, 25, :3]) == (1, 0, 0)
    assert tuple(pixels[5, 25, :3]) == (1, 1, 1)


def test_an_area_is_filled_and_outlined(image):
    pixels = image(areas=[Area(((10, 40), (10, 10), (90, 10), (90, 40)), "#00ff00", "#0000ff")])
    assert tuple(pixels[25, 50, :3]) == (0, 1, 0)
    assert pixels[9:12, 50, 2].max() > 0.5


def test_words_leave_ink(image):
    pixels = image(words=[Words(50, 25, "88", 20, "#000000", "middle")])
    assert pixels[15:35, 35:65, :3].min() < 0.2
    assert pixels[:, :30, :3].min() == 1
