"""A fit that goes on within an epoch does what the uninterrupted one does, to the bit."""

from __future__ import annotations

import pytest

from tests.support import sharded_fits
from tests.support.pairs import first, slow
from tests.support.saving_fits import count_values, fit_from

# As (ranks, options of the strategy); the schedule of each has other stages, and elsewhere.
FORMS = {
    "1": (1, {}),
    "zb_h1": (2, {}),
    "1f1b": (2, {"schedule": "1f1b"}),
    "folder": (2, {"save_distributed_checkpoint": True}),
    "interleaved": (2, {"schedule": "interleaved_1f1b"}),
    "v": (2, {"schedule": "zb_v", "save_distributed_checkpoint": True}),
    "split": (2, {"split": [2, 6]}),
}
EPOCH = 5


@pytest.fixture(scope="module")
def uninterrupted(ranks, tmp_path_factory):
    """Fits with dropout and a shuffled loader, as the form of their strategy; kept."""
    made = {}

    def fit(form):
        if form not in made:
            folder = str(tmp_path_factory.mktemp(form))
            size, options = FORMS[form]
            made[form] = folder, ranks(size).run(fit_from, size, folder, None, options)[0]
        return made[form]

    return fit


def path_after(folder, step):
    return f"{folder}/epoch={step // EPOCH}-step={step}.ckpt"


@pytest.mark.parametrize(
    ("written", "read", "step"),
    [
        ("zb_h1", "zb_h1", 3),
        ("1", "1f1b", 6),
        ("folder", "interleaved", 3),
        ("v", "split", 3),
        slow(("1f1b", "1", 3)),
        slow(("interleaved", "v", 6)),
        slow(("split", "folder", 6)),
    ],
)
def test_the_rest_of_the_fit_is_the_same(ranks, uninterrupted, tmp_path, written, read, step):
    folder, whole = uninterrupted(written)
    size, options = FORMS[read]
    path = path_after(folder, step)
    rest = ranks(size).run(fit_from, size, str(tmp_path), path, options)[0]
    assert rest == {name: values[step:] for name, values in whole.items()}


@pytest.mark.parametrize("step", first(1, [3, 6, 9]))
def test_a_plain_fit_goes_on_within_an_epoch(ranks, tmp_path_factory, tmp_path, step):
    folder = str(tmp_path_factory.mktemp("plain"))
    whole = fit_from(0, folder, None, {}, shuffled=False)
    path = path_after(folder, step)
    rest = ranks(2).run(fit_from, 2, str(tmp_path), path, {}, False)[0]
    assert rest["losses"] == pytest.approx(whole["losses"][step:], rel=1e-12)
    assert rest["batches"] == whole["batches"][step:]


@pytest.mark.parametrize("form", ["zb_h1", "folder"])
def test_a_rank_has_and_reads_its_own_part_only(ranks, tmp_path, form):
    expected = count_values(0, str(tmp_path / "plain.ckpt"), {})
    size, options = FORMS[form]
    found = ranks(size).run(count_values, size, str(tmp_path / "last.ckpt"), options)
    assert found[0]["losses"] == pytest.approx(expected["losses"], rel=1e-12)
    assert max(rank["received"] for rank in found) <= 1
    model, optimizer, tied = 20, 19 * 3, 3
    assert sum(rank["read"] for rank in found) == size * model + optimizer + tied


@pytest.mark.parametrize("options", [{}, {"schedule": "zb_v"}], ids=["auto", "zb_v"])
def test_a_fit_goes_on_from_a_folder_of_fsdp(ranks, sharded, options):
    path, losses = sharded
    rest = ranks(2).run(sharded_fits.fit, "pipeline", path, True, options)[0]
    assert rest == pytest.approx(losses[EPOCH:], rel=1e-9)


@pytest.fixture(scope="module")
def sharded(ranks, tmp_path_factory):
    """A folder that two processes have written after one epoch, and one device's losses of two."""
    path = str(tmp_path_factory.mktemp("sharded") / "first.ckpt")
    losses = sharded_fits.fit("plain", path, False, {})
    found = ranks(2).run(sharded_fits.fit, "sharded", path, False, {})
    assert found[0] == pytest.approx(losses[:EPOCH], rel=1e-9)
    return path, losses
