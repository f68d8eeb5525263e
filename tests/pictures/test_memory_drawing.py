import pytest

from lightning_pipeoffload.pictures.memory_drawing import MemoryPanel, draw_memory, planned_panels
from lightning_pipeoffload.schedule import Costs, build, simulate

MIB = 2**20
COSTS = Costs(1.0, 1.0, 1.0, activation=MIB, offload=0.5, reload=0.5)


def measured(end=40.0, most=4 * MIB):
    device, host = [(0.0, 0.0), (1.0, most), (end, 0.0)], [(0.0, 0.0), (2.0, MIB), (end, 0.0)]
    return MemoryPanel("measured", device, host, [], end)


def test_what_is_planned_has_the_plans_peaks():
    timeline = simulate(build("po_h", 2, 8, costs=COSTS), COSTS)
    for rank, panel in enumerate(planned_panels(timeline, COSTS)):
        assert max(memory for _, memory in panel.device) == timeline.peak_memory[rank]
        assert max(memory for _, memory in panel.host) == timeline.peak_host_memory[rank]


def test_each_rank_has_its_panels_and_peaks():
    drawing = draw_memory([[measured()], [measured(most=2.5 * MIB)]], "a title")
    words = [entry.text for entry in drawing.words]
    assert {"a title", "rank 0 measured", "rank 1 measured"} <= set(words)
    assert [text for text in words if text.startswith("device")] == [
        "device peak 4.00 MiB",
        "device peak 2.50 MiB",
    ]


def test_all_panels_have_one_scale():
    drawing = draw_memory([[measured(end=40.0), measured(end=20.0, most=2 * MIB)]], "")
    whole, half = drawing.areas[0], drawing.areas[2]
    sizes = [
        (max(x) - min(x), max(y) - min(y))
        for x, y in (zip(*area.points, strict=True) for area in (whole, half))
    ]
    assert sizes[0] == pytest.approx((2 * sizes[1][0], 2 * sizes[1][1]))


def test_a_step_without_saved_bytes_is_drawn():
    assert not draw_memory([[MemoryPanel("plan", [], [], [], 0.0)]], "").areas
