"""The picture of what each rank has kept, beside its plan."""

import lightning as L
import pytest

from lightning_pipeoffload import MemoryPicture
from tests.support import fits


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


def test_another_strategy_has_no_plan():
    trainer = L.Trainer(**fits.SILENT, max_steps=1, callbacks=[MemoryPicture("memory.svg")])
    with pytest.raises(ValueError, match='SingleDeviceStrategy; use strategy="pipeoffload"'):
        trainer.fit(fits.Net(), fits.loader())
