"""Imports run downwards only: schedule needs nothing, runtime torch, the strategy lightning."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

NAME = "lightning_pipeoffload"
ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / NAME
MODULES = sorted(PACKAGE.rglob("*.py"))
# Lowest first: each imports those before it. "runtime" is what lies flat in runtime/.
LAYERS = (
    "lightning_names",
    "schedule",
    "pictures",
    "runtime/device",
    "runtime",
    "runtime/batch",
    "runtime/users_code",
    "runtime/shapes",
    "runtime/weight_grad",
    "runtime/compiled",
    "runtime/memory",
    "runtime/sequence",
    "runtime/cut",
    "runtime/making",
    "runtime/step",
    "runtime/comm",
    "runtime/tensor_parallel",
    "runtime/run",
    "runtime/whole",
    "runtime/measure",
    "planning",
    "optimizers",
    "processes",
    "texts",
    "checkpoints",
    "metrics",
    "loop/hooks",
    "loop",
    "odc",
    "strategy",
    "strategy_names",
    "callbacks",
    "",
    "demos",
    "cli",
    "train",
    "plan",
)


# A front would import torch, without which the commands start.
WITHOUT_FRONT = {"", "cli", "planning", "texts"}


def name_of(path):
    """Return where a module lies below the package, by folders; a package is its folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "/".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(module) for module in MODULES}


def layer_of(name):
    """Return the room that is listed, or else its folder."""
    first, *rest = name.split("/")
    room = f"{first}/{rest[0]}" if rest else first
    return room if room in LAYERS else first


@cache
def imports_of(path):
    """Return the absolute names of everything that a module imports, wherever in the file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(parts[: -node.level]) if node.level else []
            base += node.module.split(".") if node.module else []
            names += [".".join([*base, alias.name]) for alias in node.names]
    return names


IMPORTS = {name_of(module): imports_of(module) for module in MODULES}


def own_imports_of(name):
    """Return the modules of the package that a module imports, or imports something of."""
    parts = [imported.partition(".") for imported in IMPORTS[name]]
    own = {rest.replace(".", "/") for package, _, rest in parts if package == NAME}
    return {imported if imported in NAMES else imported.rpartition("/")[0] for imported in own}


def imports_within(folder):
    """Return each module of a folder with each of its imports."""
    modules = [name for name in IMPORTS if f"{name}/".startswith(f"{folder}/")]
    return [(name, imported) for name in modules for imported in IMPORTS[name]]


def test_imports_run_downwards():
    below = {layer: {*LAYERS[: index + 1]} for index, layer in enumerate(LAYERS)}
    upwards = [
        (name, imported)
        for name in NAMES
        for imported in own_imports_of(name)
        if layer_of(imported) not in below[layer_of(name)]
    ]
    assert not upwards


def test_no_module_imports_itself_by_way_of_others():
    imports = {name: own_imports_of(name) for name in NAMES}
    while imports:
        leaves = {
            name for name, others in imports.items() if not (others - {name}) & imports.keys()
        }
        assert leaves, f"circles among {sorted(imports)}"
        for name in leaves:
            del imports[name]


def python_files():
    """Yield every file with the folder in which its tests, or what it tests, lie."""
    for base in (PACKAGE, ROOT / "tests", ROOT / "examples"):
        yield from ((path, path.parent.relative_to(base).as_posix()) for path in base.rglob("*.py"))


def names_out_of(path):
    """Yield each module of the package from which a file imports names."""
    for imported in imports_of(path):
        package, _, rest = imported.partition(".")
        module = rest.rpartition(".")[0].replace(".", "/")
        if package == NAME and rest.replace(".", "/") not in NAMES and module in NAMES:
            yield module


def test_a_package_is_used_through_its_front():
    # Its __init__.py. A test lies where what it tests lies, and may name that module.
    deep = [
        (str(path), module)
        for path, folder in python_files()
        for module in names_out_of(path)
        if (PACKAGE / f"{module}.py").exists()
        if module.rpartition("/")[0] not in {folder, *WITHOUT_FRONT}
        if module.partition("/")[0] != "schedule" or not folder.startswith("schedule")
    ]
    assert not deep


def test_a_front_lists_what_others_use():
    # But those of the package and of schedule/, which users import.
    used = {name for path, _ in python_files() for name in imports_of(path)}
    fronts = {name for name in NAMES if (PACKAGE / name / "__init__.py").exists()} - {
        "",
        "schedule",
    }
    listed = {
        f"{NAME}.{front}.{imported.rpartition('.')[2]}".replace("/", ".")
        for front in fronts
        for imported in IMPORTS[front]
    }
    assert not listed - used


def test_schedule_imports_the_standard_library_and_itself_relatively():
    assert not [p for p in (PACKAGE / "schedule").rglob("*.py") if NAME in p.read_text()]
    # The solver is an extra: imported by the one function that calls it, see ALONE.
    others = {("schedule/solver/plan_model", "ortools")}
    assert not [
        (name, imported)
        for name, imported in imports_within("schedule")
        if not imported.startswith(f"{NAME}.schedule.")
        and imported.split(".")[0] not in sys.stdlib_module_names
        and (name, imported.split(".")[0]) not in others
    ]


def test_runtime_does_not_know_lightning():
    imports = imports_within("runtime")
    assert not [(name, other) for name, other in imports if other.split(".")[0] == "lightning"]


def test_there_are_modules_in_every_layer():
    assert {layer_of(name) for name in NAMES} == {*LAYERS}


ALONE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location(
    "alone", sys.argv[1] + "/__init__.py", submodule_search_locations=[sys.argv[1]]
)
package = sys.modules["alone"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
package.simulate(package.lower(package.build("1f1b", 4, 8)), package.Costs.unit())
print({"torch", "lightning", "lightning_pipeoffload", "ortools"} & sys.modules.keys())
"""


def test_schedule_runs_alone():
    command = [sys.executable, "-c", ALONE, str(PACKAGE / "schedule")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
