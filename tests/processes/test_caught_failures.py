"""What every rank raises alike reaches the caller, and the processes go on."""

from __future__ import annotations

import pytest

from tests.support.caught import FAILURES, sweep


@pytest.mark.parametrize(
    ("size", "failures", "keep"),
    [(2, FAILURES, "nothing"), (3, ("probe", "step"), "trainer"), (1, ("step",), "trainer")],
)
def test_a_sweep_goes_on_after_trials_that_fail_everywhere(ranks, tmp_path, size, failures, keep):
    pool = ranks(size)
    done = pool.run(sweep, size, failures, keep, str(tmp_path))

    plain = sweep(0, failures, keep, "")
    for rank in done:
        assert rank["caught"] == [f"no such thing in {failure}" for failure in failures]
        assert rank["steps"] == plain["steps"]
        assert rank["loss"] == pytest.approx(plain["loss"], rel=1e-9)
    # What callbacks would save on an exception has parts of every rank; the last trial saves.
    assert [path.name[:6] for path in tmp_path.iterdir()] == ["epoch="] * (size > 1)
