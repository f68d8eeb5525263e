"""What the README and the pages of docs/ say of arguments and files is so."""

import re
from datetime import timedelta
from inspect import getdoc, signature
from pathlib import Path

import pytest
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.schedule import SCHEDULES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKS = {
    (page, link)
    for page in PAGES
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
}
GIVEN_BY_THE_TRAINER = {
    *("self", "accelerator", "parallel_devices", "cluster_environment"),
    *("checkpoint_io", "precision_plugin"),
}


def page(name):
    return (ROOT / "docs" / name).read_text()


def test_every_argument_is_in_the_table_with_its_default():
    written = re.findall(r"^\| `(\w+)` \| (\S.*?) \|", page("arguments.md"), re.MULTILINE)
    defaults = {
        name: parameter.default
        for name, parameter in signature(PipeOffloadStrategy.__init__).parameters.items()
        if name not in GIVEN_BY_THE_TRAINER
    }
    assert {name: read(default) for name, default in written} == defaults


def read(default):
    number, _, minutes = default.partition(" minutes")
    return eval(default.strip("`")) if number == default else timedelta(minutes=int(number))


def test_every_argument_is_in_the_docstring():
    arguments = getdoc(PipeOffloadStrategy).partition("Args:")[2].partition("Raises:")[0]
    documented = set(re.findall(r"^    (\w+): ", arguments, re.MULTILINE))
    assert documented == signature(PipeOffloadStrategy.__init__).parameters.keys() - {"self"}


@pytest.mark.parametrize(
    "there", [FSDPStrategy, DeepSpeedStrategy, FullyShardedDataParallel], ids=lambda of: of.__name__
)
def test_every_argument_of_lightnings_strategies_has_its_line(there):
    written = set(re.findall(r"`(\w+)\b", page("from_fsdp_and_deepspeed.md")))
    parameters = signature(there.__init__).parameters.values()
    named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    assert named - written == {"self"} | ({"module"} & named)


def test_every_schedule_is_in_the_table():
    table = page("schedules.md").partition("## Schedules\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", table)) == set(SCHEDULES)


@pytest.mark.parametrize(("page", "link"), sorted(LINKS), ids=str)
def test_every_link_leads_somewhere(page, link):
    assert (page.parent / link).exists()


def test_the_first_ten_minutes_are_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
