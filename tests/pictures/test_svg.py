from xml.etree import ElementTree

from lightning_pipeoffload.pictures.drawing import Area, Box, Drawing, Words
from lightning_pipeoffload.pictures.svg import to_svg

SVG = "{http://www.w3.org/2000/svg}"


def root(**parts):
    return ElementTree.fromstring(to_svg(Drawing(100, 50, **parts)))


def test_the_canvas_has_the_size_of_the_drawing():
    svg = root()
    assert (svg.get("width"), svg.get("height"), svg.get("viewBox")) == ("100", "50", "0 0 100 50")


def test_a_box_with_a_hint():
    _, box = root(boxes=[Box(1, 2, 3, 4, "#ff0000", "a & b")]).findall(SVG + "rect")
    assert [box.get(name) for name in ("x", "y", "width", "height")] == [
        "1.00",
        "2.00",
        "3.00",
        "4.00",
    ]
    assert box.find(SVG + "title").text == "a & b"


def test_an_area_has_a_filling_and_an_outline():
    svg = root(areas=[Area(((0, 9), (5, 1), (9, 9)), "#aaaaaa", "#111111")])
    assert svg.find(SVG + "polygon").get("points") == "0.00,9.00 5.00,1.00 9.00,9.00"
    assert svg.find(SVG + "polyline").get("stroke") == "#111111"


def test_words_are_escaped_and_anchored():
    words = root(words=[Words(5, 6, "a < b", 11, "#000000", "middle")]).find(SVG + "text")
    assert (words.text, words.get("text-anchor"), words.get("font-size")) == (
        "a < b",
        "middle",
        "11.0",
    )
