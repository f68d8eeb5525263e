"""Imports run downwards only: schedule needs nothing, runtime torch, the strategy lightning."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

NAME = "lightning_pipeoffload"
PACKAGE = Path(__file__).parents[1] / NAME
TOP_LAYER = {"strategy", "monitor", "checkpoint", "cli", "train", "plan"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def imports_of(path):
    """Yield the absolute name of everything that a module imports, wherever in the file."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(parts[: -node.level]) if node.level else []
            base += node.module.split(".") if node.module else []
            yield from (".".join([*base, alias.name]) for alias in node.names)


def modules_in(*folders):
    return [m for m in MODULES if m.relative_to(PACKAGE).parts[0] in folders]


def named(path):
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("module", modules_in("schedule"), ids=named)
def test_schedule_imports_the_standard_library_and_itself(module):
    for imported in imports_of(module):
        own = imported.startswith(f"{NAME}.schedule.")
        assert own or imported.split(".")[0] in sys.stdlib_module_names, imported


@pytest.mark.parametrize("module", modules_in("schedule"), ids=named)
def test_schedule_imports_itself_relatively(module):
    assert NAME not in module.read_text()


@pytest.mark.parametrize("module", modules_in("runtime", "demos"), ids=named)
def test_runtime_and_demos_import_nothing_of_the_layer_above(module):
    for imported in imports_of(module):
        package, _, rest = imported.partition(".")
        assert package != NAME or rest.split(".")[0] not in TOP_LAYER, imported


@pytest.mark.parametrize("module", modules_in("runtime"), ids=named)
def test_runtime_does_not_know_lightning(module):
    assert not [name for name in imports_of(module) if name.split(".")[0] == "lightning"]


def test_there_are_modules_to_look_at():
    assert {path.parent.name for path in modules_in("schedule", "runtime")} >= {
        "schedule",
        "runtime",
    }


ALONE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location(
    "alone", sys.argv[1] + "/__init__.py", submodule_search_locations=[sys.argv[1]]
)
package = sys.modules["alone"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
package.simulate(package.lower(package.build("1f1b", 4, 8)), package.Costs.unit())
print({"torch", "lightning", "lightning_pipeoffload"} & sys.modules.keys())
"""


def test_schedule_runs_alone():
    command = [sys.executable, "-c", ALONE, str(PACKAGE / "schedule")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
