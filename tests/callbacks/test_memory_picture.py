"""The picture of what each rank has kept, next to its plan."""

import lightning as L
import pytest

from lightning_pipeoffload import MemoryPicture
from lightning_pipeoffload.callbacks.memory_picture import MemoryPanel, draw_memory, planned_panels
from lightning_pipeoffload.schedule import Costs, build, simulate
from tests.support import fits

MIB = 2**20
COSTS = Costs(1.0, 1.0, 1.0, activation=MIB, offload=0.5, reload=0.5)


def _fit_and_draw(path):
    trainer = fits.trainer(2, {"schedule": "po_h"}, max_steps=2, callbacks=[MemoryPicture(path)])
    trainer.fit(fits.Net(), fits.loader(), fits.loader())
    return trainer.strategy.report(live_bytes=True)["measured"]


def test_the_picture_shows_every_rank(ranks, tmp_path):
    path = tmp_path / "memory.svg"
    measured = ranks(2).run(_fit_and_draw, str(path))[0]
    text = path.read_text()
    for rank in range(2):
        assert f"rank {rank} plan" in text
        assert f"rank {rank} measured" in text
        *_, last = measured["live_bytes"][rank]
        assert last[1:] == (0, 0, 0)  # all is used up


def test_another_ending_is_refused():
    with pytest.raises(ValueError, match=r"path \(memory.jpg\) .* must end in .svg or .png"):
        MemoryPicture("memory.jpg")


def _refusal_of(path):
    with pytest.raises(ValueError, match="MemoryPicture cannot be written") as error:
        _fit_and_draw(path)
    return str(error.value)


def test_a_folder_that_is_missing_is_refused_before_training(ranks, tmp_path):
    path = tmp_path / "none" / "memory.svg"
    for refusal in ranks(2).run(_refusal_of, str(path)):
        assert refusal.endswith(f"make the folder {path.parent} first")


def test_another_strategy_has_no_plan():
    trainer = L.Trainer(**fits.SILENT, max_steps=1, callbacks=[MemoryPicture("memory.svg")])
    with pytest.raises(ValueError, match='SingleDeviceStrategy; use strategy="pipeoffload"'):
        trainer.fit(fits.Net(), fits.loader())


def measured(end=40.0, most=4 * MIB):
    device, host = [(0.0, 0.0), (1.0, most), (end, 0.0)], [(0.0, 0.0), (2.0, MIB), (end, 0.0)]
    return MemoryPanel("measured", device, host, [], end)


def test_what_is_planned_has_the_plans_peaks():
    timeline = simulate(build("po_h", 2, 8, costs=COSTS), COSTS)
    for rank, panel in enumerate(planned_panels(timeline, COSTS)):
        assert max(memory for _, memory in panel.device) == timeline.peak_memory[rank]
        assert max(memory for _, memory in panel.host) == timeline.peak_host_memory[rank]


def test_each_rank_has_its_panels_and_peaks_at_one_scale():
    figure = draw_memory([[measured()], [measured(end=20.0, most=2.5 * MIB)]], "a title")
    assert figure.get_suptitle() == "a title"
    assert [axes.get_ylabel() for axes in figure.axes] == ["rank 0 measured", "rank 1 measured"]
    peaks = [axes.texts[0].get_text().split("\n")[0] for axes in figure.axes]
    assert peaks == ["device peak 4.00 MiB", "device peak 2.50 MiB"]
    assert {axes.get_xlim() for axes in figure.axes} == {(0, 40e3)}
    for axes in figure.axes:
        assert axes.get_ylim()[1] == pytest.approx(1.05 * 4 * MIB)


def test_a_step_without_saved_bytes_is_drawn():
    assert draw_memory([[MemoryPanel("plan", [], [], [], 0.0)]], "").axes
