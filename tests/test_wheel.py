"""A wheel of the package works where the repository is not: code, configuration and scripts."""

import json
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.programs import output_of

REPOSITORY = Path(__file__).parents[1]
SMALL = [
    *("trainer=cpu", "trainer.max_steps=2", "+trainer.limit_val_batches=1"),
    *("trainer.val_check_interval=1.0", "model.width=16", "data.context=8", "model.context=8"),
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """Install the wheel into a fresh environment; return the folder of its scripts.

    Its dependencies are those of this environment, without what is installed in place there.
    """
    folder = tmp_path_factory.mktemp("wheel")
    make = ("make", "-C", REPOSITORY, "wheel", f"PYTHON={sys.executable}", f"WHEELS={folder}")
    run(*make, cwd=folder)
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    (wheel,) = folder.glob("*.whl")
    assert f"/{wheel.name}[" in (REPOSITORY / "docs/first_hour.md").read_text()
    binaries = folder / "venv" / "bin"
    run(binaries / "pip", "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return binaries


def run(*command, cwd):
    return output_of(command, cwd, PYTHONPATH="", OMP_NUM_THREADS="1")  # as where it is not set


def test_the_package_is_the_installed_one(scripts, tmp_path):
    code = "import lightning_pipeoffload; print(lightning_pipeoffload.__file__)"
    found = Path(run(scripts / "python", "-c", code, cwd=tmp_path).strip())
    assert found.is_relative_to(scripts.parent)


def test_the_schedules_run_on_their_own(scripts, tmp_path):
    sizes = ["schedule=zb_v", "num_ranks=4", "num_microbatches=8", "format=json"]
    printed = run(scripts / "pipeoffload-plan", *sizes, cwd=tmp_path)
    assert json.loads(printed)["schedule"] == "zb_v"


def test_it_trains(scripts, tmp_path):
    printed = run(scripts / "pipeoffload-train", "schedule=zb_h1", *SMALL, cwd=tmp_path)
    assert "Measured: zb_h1, 2 ranks" in printed
    assert len(list(tmp_path.rglob("*.ckpt"))) == 1
