"""Batches of many lengths are trained and evaluated as on one device, most without a trace."""

from pathlib import Path

import pytest

from tests.support.length_fits import RESUMED, fit
from tests.support.pairs import first

FORMS = first(1, [{}, {"schedule": "zb_v", "derive_lengths": False}])


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_they_are_exact_also_in_evaluations_and_after_a_checkpoint(ranks, tmp_path, options):
    expected, _ = fit(0, str(tmp_path / "plain"), None, {})
    (found, derived), (_, others) = ranks(2).run(fit, 2, str(tmp_path / "two"), None, options)
    assert found == pytest.approx(expected, rel=1e-12)
    assert derived == others
    kinds = {kind for kind, _ in derived}
    assert kinds == ({"training_step", "validation_step"} if options == {} else set())
    (path,) = Path(tmp_path / "two").glob(f"*step={RESUMED}.ckpt")
    (rest, _), _ = ranks(2).run(fit, 2, str(tmp_path / "rest"), str(path), options)
    assert rest == found[-len(rest) :]
