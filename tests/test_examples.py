"""Each example runs as its header says, in a small size, over two ranks."""

import importlib.util
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from lightning_pipeoffload.processes import free_port
from tests.support.pairs import slow
from tests.support.programs import output_of

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = {
    "own_gpt": "--steps 2 --width 16 --context 8 --batch-size 8",
    "hf_llama": "--steps 2 --width 16 --context 8 --batch-size 8 --layers 4",
    "finetune_hf": "--steps 2 --width 16 --context 8 --batch-size 8 --layers 4",
    "qlora": "--steps 2 --width 64 --context 8 --batch-size 8 --layers 4",
    "generate": "--epochs 1 --samples 16 --batch-size 8 --width 16 --layers 2",
    "vision": "--images 128 --width 4",
    "simclr": "--images 256 --width 8",
    "packed_rows": "--steps 2 --texts 40 --rows 4 --max-tokens 64 --width 16",
    "tensor_parallel": "--steps 2 --devices 2 --width 16 --context 8 --batch-size 8 --layers 2",
    "on_demand": "--steps 2 --texts 40 --width 16 --layers 2 --max-tokens 128",
}
COMPARED = ["one device", "fsdp", "pipeoffload_zb_v"]
CONSOLE_SCRIPT = """
from lightning_pipeoffload.train import main
if __name__ == "__main__":
    main()
"""


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name, folder):
    before = Path.cwd()
    os.chdir(folder)
    try:
        example = load(name)
        line = [*SMALL[name].split(), "--accelerator", "cpu"]
        example.main(example.read_arguments(line))
    finally:
        os.chdir(before)


def checkpoint_in(folder):
    (path,) = folder.rglob("*.ckpt")
    return torch.load(path, weights_only=False)


@pytest.mark.parametrize("name", map(slow, SMALL))  # strategy and models have tests of their own
def test_an_example_trains_over_two_ranks(ranks, name, tmp_path):
    ranks(2).run(run, name, tmp_path)
    assert checkpoint_in(tmp_path)["global_step"] == 2


@pytest.mark.parametrize("name", [*SMALL, "compare_strategies"])
def test_the_commands_in_the_header_are_accepted(name):
    example = load(name)
    commands = re.findall(rf"^    python examples/{name}\.py(.*)$", example.__doc__, re.MULTILINE)
    assert len(commands) == 2
    assert [vars(example.read_arguments(shlex.split(line))) for line in commands]


def test_texts_that_are_packed_do_not_see_each_other():
    example = load("on_demand")
    torch.manual_seed(0)
    module = example.PackedLlama(context=32, width=16, layers=2).double()
    texts = [torch.randint(256, (length,)) for length in (9, 5, 12)]
    module.log = lambda *args, **kwargs: None
    packed = module.training_step(example.pack(texts), 0)
    counts = [len(text) - 1 for text in texts]
    pairs = [*zip(texts, counts, strict=True)]
    apart = [module.training_step(example.pack([text]), 0) * count for text, count in pairs]
    assert torch.allclose(packed, sum(apart) / sum(counts), rtol=1e-6)
    model = example.GPT(context=32, width=16, depth=2, heads=4, dropout=0.0).double()
    model.log = lambda *args, **kwargs: None
    padded = model.training_step(example.pad(texts), 0)
    apart = [model.training_step(example.pad([text]), 0) * count for text, count in pairs]
    assert torch.allclose(padded, sum(apart) / sum(counts), rtol=1e-12)


@pytest.mark.slow
def test_strategies_are_compared_on_the_same_batches(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", str(free_port()))  # Lightning's own may be taken meanwhile
    example = load("compare_strategies")
    sizes = "--accelerator cpu --steps 4 --width 16 --depth 4 --context 8 --batch-size 8"
    line = [*sizes.split(), "--picture", str(tmp_path / "compared.png"), "--rows", *COMPARED]
    example.main(example.read_arguments(line), line)
    rows = [line.split("│") for line in capfd.readouterr().out.splitlines() if "│" in line]
    found = {row[1].strip(): [float(row[3].split(",")[0]), float(row[5])] for row in rows}
    assert list(found) == COMPARED
    assert all(memory > 0 and difference < 1e-4 for memory, difference in found.values())
    assert (tmp_path / "compared.png").stat().st_size > 0


@pytest.mark.slow
def test_a_configuration_of_the_users_own(tmp_path):
    folder = shutil.copytree(EXAMPLES / "own_config", tmp_path / "own")
    script = tmp_path / "bin" / "pipeoffload-train"  # as pip makes it, away from the user's folder
    script.parent.mkdir()
    script.write_text(CONSOLE_SCRIPT)
    command = re.search(r"^    pipeoffload-train (.*)$", load("own_config/waves").__doc__, re.M)[1]
    small = ["model.depth=2", "model.width=8", "data.num_samples=320", "trainer.max_steps=2"]
    output_of([sys.executable, script, *shlex.split(command), *small], folder)
    assert checkpoint_in(folder)["state_dict"].keys() >= {"enter.weight", "blocks.1.norm.bias"}


@pytest.mark.slow
def test_the_notebook_runs_in_a_kernel(tmp_path):
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "'loss': tensor(" in printed
    assert any("image/svg+xml" in output.get("data", {}) for output in outputs)
