"""What the README and the pages of docs/ say of arguments, files and commands is so.

The commands in the headers of the examples are tried in ``test_examples``.
"""

import ast
import importlib
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from datetime import timedelta
from inspect import getdoc, signature
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import LlamaConfig

import lightning_pipeoffload
from lightning_pipeoffload import PipeOffloadStrategy, plan
from lightning_pipeoffload.schedule import SCHEDULES
from tests.support.pairs import slow
from tests.support.programs import output_of

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
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


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_link_leads_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]


def test_the_readme_is_short():
    lines = README.read_text().splitlines()
    assert len(lines) <= 110
    assert not [line for line in lines if line.startswith("|") and len(line) > 120]


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    pytest.importorskip("mkdocstrings", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "api/index.html").read_text()
    assert "lightning_pipeoffload.PipeOffloadStrategy" in api
    assert ":class:" not in api
    assert ":func:" not in api
    assert not [*tmp_path.rglob("__pycache__")]
    assert (tmp_path / "messages/index.html").read_text().count("<tr>") > 250


def test_the_index_has_every_message_that_is_raised():
    found = runpy.run_path(ROOT / "docs/refusals.py")
    text, messages = found["index"](), {message for _, message in found["refusals"]()}
    assert len(messages) > 250
    assert not [m for m in messages if found["_row"](m) not in text]
    for known in (
        "to skip a bad batch",
        "did you mean",
        "runs on Linux only",
    ):
        assert known in text


@pytest.mark.slow
def test_the_program_of_the_first_hour_trains_and_goes_on(tmp_path):
    text = page("first_hour.md")
    program = re.search(r"```python\n(import lightning as L\nimport torch\n.*?)```", text, re.S)[1]
    resumed = re.search(r"trainer.fit\(Net\(\), data, ckpt_path=.*\)", text)[0]
    again = program.replace("max_epochs=3", "max_epochs=4").replace(
        "trainer.fit(Net(), data)", resumed
    )
    for code in (program, again):
        assert code != program or resumed not in code
        (tmp_path / "train.py").write_text(code)
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        assert "Measured: " in output_of([sys.executable, "train.py"], tmp_path, **environment)
    assert (tmp_path / "lightning_logs/version_1/checkpoints/epoch=3-step=256.ckpt").exists()


NAMED = re.findall(r"`([\w.]+)`\s+in\s+`([\w/]+\.py)`", (ROOT / "CONTRIBUTING.md").read_text())


def test_what_contributing_names_is_where_it_says():
    missing = []
    for name, path in NAMED:
        found = [ROOT / "lightning_pipeoffload" / path, ROOT / path]
        text = next((file.read_text() for file in found if file.exists()), "")
        for part in name.split("."):
            if not re.search(rf"^\s*(?:(?:def|class) {part}\b|{part}(?:: .*)? = )", text, re.M):
                missing.append((name, path))
    assert len(NAMED) > 30
    assert not missing


def test_every_path_that_contributing_names_exists():
    written = (ROOT / "CONTRIBUTING.md").read_text()
    paths = set(re.findall(r"`((?:[\w-]+/)*[\w-]+(?:\.\w+|/))`", written))
    bases = [ROOT, ROOT / "lightning_pipeoffload"]
    paths -= {"conf/schedule/name.yaml", "Schedule.of"}
    assert not [
        path for path in paths if "/" in path and not any((b / path).exists() for b in bases)
    ]


PYTHON = [
    (path.name, textwrap.dedent(code))
    for path in PAGES
    for code in re.findall(r"^ *```python\n(.*?)^ *```", path.read_text(), re.MULTILINE | re.DOTALL)
]


@pytest.mark.parametrize(("page", "code"), PYTHON, ids=[page for page, _ in PYTHON])
def test_programs_name_what_there_is(page, code):
    nodes = [*ast.walk(ast.parse(code))]
    package = lightning_pipeoffload.__name__
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package):
            module = importlib.import_module(node.module)
            assert not [alias.name for alias in node.names if not hasattr(module, alias.name)]
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "PipeOffloadStrategy":
            values = [keyword.value for keyword in node.keywords]
            if all(isinstance(value, (ast.Constant, ast.List)) for value in values):
                eval(ast.unparse(node), {"PipeOffloadStrategy": PipeOffloadStrategy})
            known = signature(PipeOffloadStrategy.__init__).parameters
            assert {keyword.arg for keyword in node.keywords} <= known.keys()


# Every command runs as it is written, or at least is understood

TEXT = "\n".join(path.read_text() for path in PAGES)
SMALL = [
    *("trainer=cpu", "trainer.max_steps=2", "trainer.val_check_interval=1.0", "model.width=16"),
    *("data.num_val_windows=16", "model.context=16", "data.context=16"),
]


def commands(name):
    """List the arguments of a command, in blocks of code and in running text."""
    lines = re.findall(rf"^{name} +(\S.*)$", TEXT, re.MULTILINE)
    inline = re.findall(rf"`{name}\s+([^`]*=[^`]*)`", TEXT)
    return sorted({" ".join(found.partition("#")[0].split()) for found in [*lines, *inline]})


def test_there_are_commands():
    assert len(commands("pipeoffload-plan")) >= 6
    assert len(commands("pipeoffload-train")) >= 1


# The solver searches for half a minute, a sweep plans every family, a base in 4 bits is traced; all
# have tests elsewhere.
LONG = ("optpipe", "sweep=", "model.folder=")


@pytest.mark.parametrize(
    "line",
    [
        slow(line) if any(word in line for word in LONG) else line
        for line in commands("pipeoffload-plan")
    ],
)
def test_a_plan_is_made(line, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    for folder in re.findall(r"model\.folder=(\S+)", line):
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 16}
        LlamaConfig(**sizes, num_attention_heads=2, vocab_size=256).save_pretrained(folder)
        program = re.search(r"```python\n(.*?class Mine.*?)```", page("schedules.md"), re.DOTALL)[1]
        shares_layers = re.search(r"tensor_parallel_size=\d", line)
        Path("mine.py").write_text(_with_shared_layers(program) if shares_layers else program)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "mine", raising=False)  # of another line
    monkeypatch.setattr(sys, "argv", ["pipeoffload-plan", *shlex.split(line)])
    plan.main()
    assert "bubble" in capsys.readouterr().out
    for picture in re.findall(r"picture=(\S+)", line):
        assert (tmp_path / picture).stat().st_size > 0


def _with_shared_layers(program):
    """Return the program with the call that docs/cluster.md adds after the line of the model."""
    call = re.search(r"`(parallelize_module\(self\.model.*?\))`", page("cluster.md"), re.DOTALL)[1]
    line = next(line for line in program.splitlines() if "self.model = Auto" in line)
    imports = (
        "from torch.distributed.tensor.parallel import parallelize_module\n"
        "from lightning_pipeoffload import tensor_parallel_plan\n"
    )
    indent = " " * (len(line) - len(line.lstrip()))
    return imports + program.replace(line, f"{line}\n{indent}{' '.join(call.split())}")


# What is submitted to Slurm is tried in test_slurm.
HERE = [line for line in commands("pipeoffload-train") if "cluster=slurm" not in line]


@pytest.mark.slow
@pytest.mark.parametrize("line", HERE)
def test_a_training_runs(line, tmp_path):
    train = [sys.executable, "-m", "lightning_pipeoffload.train"]
    assert "samples/s" in output_of([*train, *shlex.split(line), *SMALL], tmp_path)


@pytest.mark.parametrize(
    "target", sorted(set(re.findall(r"\bmake (train|test|docs|gpu|wheel)\b", TEXT)))
)
def test_make_knows_the_target(target):
    make = ["make", "--dry-run", target, f"PYTHON={sys.executable}"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_several_nodes_under_slurm(monkeypatch):
    (line,) = re.findall(r"^srun (.*) python train.py +# Trainer\((.*)\)$", TEXT, re.MULTILINE)
    nodes, tasks = re.findall(r"=(\d+)", line[0])
    ntasks = {"JOB_NAME": "train", "NTASKS": int(nodes) * int(tasks), "NTASKS_PER_NODE": tasks}
    for name, value in ntasks.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    for name, value in {"NNODES": nodes, "STEP_ID": 0, "PROCID": 0, "LOCALID": 0}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    trainer = L.Trainer(**eval(f"dict({line[1]})"), accelerator="cpu", logger=False)
    assert trainer.world_size == int(nodes) * int(tasks)
