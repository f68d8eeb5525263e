"""What ModelCheckpoint and the user save, keep, remove and name: as on one device."""

import pytest
import torch

from tests.support import saving_fits
from tests.support.pairs import first

FORMS = {"file": {}, "folder": {"save_distributed_checkpoint": True}}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What one device does: the folder, the fit, and the fit that goes on."""
    folder = str(tmp_path_factory.mktemp("one"))
    return folder, saving_fits.fit_and_save(0, folder, {}), saving_fits.resume(0, folder, {})


@pytest.fixture(scope="module", params=first(1, ["folder", "file"]))
def found(request, ranks, tmp_path_factory):
    """The same over two ranks."""
    folder = str(tmp_path_factory.mktemp(request.param))
    options = FORMS[request.param]
    saved = ranks(2).run(saving_fits.fit_and_save, 2, folder, options)
    return folder, saved, ranks(2).run(saving_fits.resume, 2, folder, options)


def test_files_paths_and_hooks_are_those_of_one_device_on_every_rank(expected, found):
    for known in ("files", "described", "loaded"):
        assert [rank[known] for rank in found[1]] == [expected[1][known]] * 2
    # The best, the last and paths are loaded as plain data.
    assert found[1][0]["losses"] == pytest.approx(expected[1]["losses"], rel=1e-12)


def test_a_fit_goes_on_from_the_last_checkpoint(expected, found):
    assert found[2][0]["losses"] == pytest.approx(expected[2]["losses"], rel=1e-12)
    for known in ("steps", "described"):
        assert [rank[known] for rank in found[2]] == [expected[2][known]] * 2


@pytest.mark.parametrize("name", ["before", "third", "after", "last/last"])
def test_what_is_saved_is_what_one_device_saves(expected, found, name):
    path = f"{found[0]}/{name}.ckpt"
    path = path if "file" in found[0] else saving_fits.consolidate(path)
    saved = torch.load(path, weights_only=True)
    plain = torch.load(f"{expected[0]}/{name}.ckpt", weights_only=True)
    ours = {"seed", "first_batch", "num_entries", "read"}
    assert saved.keys() == {*plain.keys(), *(f"pipeoffload_{name}" for name in ours)}
    torch.testing.assert_close(dict(saved["state_dict"]), dict(plain["state_dict"]))
    if "file" in found[0]:  # a folder has names in place of numbers
        torch.testing.assert_close(saved.get("optimizer_states"), plain.get("optimizer_states"))
    for state in saved.get("optimizer_states", ()):  # before the first step, too
        assert state.keys() == {"state", "param_groups"}
    for part in ("loops", "lr_schedulers", "global_step", "epoch", "hyper_parameters", "numbers"):
        assert saved.get(part) == plain.get(part)
