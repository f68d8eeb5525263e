"""Every fenced block of README and docs/ that can run does; the others are named with the reason.

``pipeoffload-plan``, ``pipeoffload-train`` and ``make`` are run by ``test_readme``. A program is
run as it is written, but for sizes and devices, in a process of its own, below the names that its
page takes as given (``tests.support.given_names``) and in front of what trains with it.
"""

import re
import shlex
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.pairs import slow
from tests.support.programs import output_of

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
BLOCKS = [
    (page.name, language, textwrap.dedent(text))
    for page in PAGES
    for language, text in FENCE.findall(page.read_text())
]

# Lines of commands, each with the test that runs it or the reason why none does.
COMMANDS = {
    r"pip install ": "installs packages, from a clone or a wheel: test_wheel does",
    r"pipeoffload-plan ": "test_readme::test_a_plan_is_made",
    r"pipeoffload-train ": "test_readme::test_a_training_runs",
    r"pipeoffload-(rehearse|odc) ": "test_a_command_runs",
    r"make (train|test) ": "test_readme::test_make_knows_the_target; they are the demo and CI",
    r"srun ": "test_readme::test_several_nodes_under_slurm",
    r"OMP_NUM_THREADS=1 python train.py": "test_readme::test_the_program_of_the_first_hour",
    r"python examples/": "test_examples",
    r"python \.\./shared/tools/nccl": "downloads NCCL, and is no part of the repository",
    r"CUDA_DEVICE_MAX_CONNECTIONS=32 .*gpu_check": "needs a GPU; its parts: test_gpu_check",
}
# Blocks of text that nobody types, by their first words.
TEXTS = {
    "machine 1": "a drawing of two machines",
    "training_step    before": "a drawing of a step",
    "[pipeoffload] global rank 2": "lines that a run prints",
    "Pipeline: zb_v": "lines that a run prints",
    "Measured: zb_v": "lines that a run prints",
    "flowchart": "a drawing",
    "data.context=2048 data.batch_size=64": "words for a command: test_the_words_of_a_page",
}
# Programs that do not run here, by a line of theirs.
NOT_RUN = {
    "    self.blocks = ...\n": "a skeleton of examples/tensor_parallel.py: test_examples",
    "self.count += 1": "lines that train and that do not: each is a row of tests/models",
    "block.mask = batch": "lines that train and that do not: each is a row of tests/models",
    "import lightning as L\nimport torch\nfrom torch import nn": "test_readme, the first hour",
    "trainer.fit(Net(), data, ckpt_path": "test_readme, the first hour",
    "Net.load_from_checkpoint": "test_readme, the first hour",
    "report = trainer.strategy.report()": "test_readme, the first hour",
    "def optimizer_step": "a row of tests/loop/test_bad_batches.py",
}

# Methods, by a line of theirs: the module that they are part of, and with what it trains.
METHODS = {
    "def on_train_epoch_end": ("Adapted", "max_epochs=1"),
    "def on_train_end": ("Adapted", ""),
    "parameter.grad_dtype = torch.float32": (
        "Texts",
        "precision='bf16-true', "
        "strategy=PipeOffloadStrategy(optimizer_offload=True, master_weights='float32')",
    ),
    "return chunked_loss": ("Texts", ""),
    "gradients = [p.grad for p": ("Texts", ""),
    "replace_with_bnb_linear": ("Texts", ""),
    'x = batch["x"].div_(255)': (
        "MyModule",
        "DataLoader([{'x': torch.randn(32)}] * 32, batch_size=8)",
    ),
    "cu_seq_lens_q=bounds": (
        "Texts",
        "DataLoader(dataset, batch_sampler=PackedRowsSampler(lengths, 4, 64), "
        "collate_fn=PackedRows(4, 64, cu_seqlens=True)), microbatch_weight='tokens'",
    ),
}
METHOD = "class Trained({base}):\n{method}\ntrain(Trained(), {arguments})"
# What stands around other programs: nothing, where one makes a strategy or trains by itself.
AROUND = {
    "class Finetuned": "{code}\nclass Trained(Finetuned, Texts): pass\ntrain(Trained())",
    "class Mine(L.LightningModule):\n    def __init__(self):": (
        "{code}\nclass Trained(Mine, Texts): pass\ntrain(Trained())"
    ),
    "from_config(AutoConfig.from_pretrained(self.folder))": (
        "{code}\ntrain(Mine(FOLDER), DataLoader([(torch.arange(9), 0)] * 32, batch_size=8))"
    ),
    'save_pretrained("last.ckpt", "out"': "save_alone(Texts())\n{code}",
    'save_pretrained("last.ckpt", "adapters"': (
        "save_alone(Adapted())\n"
        "peft_model = get_peft_model(AutoModelForCausalLM.from_config(config), lora)\n{code}"
    ),
    "class Lines": (
        "{code}\nassert [*map(str.strip, Lines())] == Path('lines.txt').read_text().split()"
    ),
    "self.noise = torch.Generator()": (
        "class Trained(MyModule):\n"
        "    def __init__(self):\n        super().__init__()\n        {first}\n"
        "    def training_step(self, x, batch_idx):\n        {last}\n"
        "        return self(x).square().mean()\n"
        "train(Trained(), MyDataModule().train_dataloader())"
    ),
    "monitor = PipelineMonitor(step=20": (
        "{code}\ntrainer.fit(MyModule(), datamodule=MyDataModule())\n"
        "assert Path('step.svg').exists() or trainer.global_rank"
    ),
    "class StepTrace": (
        "{code}\ntrain(MyModule(), MyDataModule().train_dataloader(), callbacks=[StepTrace()])\n"
        "text = Path(f'trace-{{os.environ.get(\"LOCAL_RANK\", 0)}}.json').read_text()\n"
        "assert '0F0' in text or '1F0' in text"
    ),
    "def cut_graphs": "{code}\ntrain(Graphs(), graphs(), strategy=strategy)",
    "pipeoffload_notebook": "model = Texts()\n{code}",
    "SVG(": (
        "{before}\nL.Trainer(accelerator='cpu', devices=2, strategy='pipeoffload_notebook',"
        " max_steps=8, callbacks=[monitor]).fit(MyModule(), MyDataModule())\n{last}"
    ),
    "MinibatchSampler": "module = Texts()\n{code}",
    "PackedRowsSampler(lengths": "module = Texts()\n{code}",
}
SMALLER = {
    'accelerator="gpu"': 'accelerator="cpu"',
    "devices=8": "devices=2",
    "devices=4": "devices=2",
    "num_rows=32": "num_rows=4",
    "max_tokens=8192": "max_tokens=64",
    "max_tokens=16384": "max_tokens=32",
    "step=20": "step=4",
    "batch_idx == 10": "batch_idx == 0",
    "batch_idx == 12": "batch_idx == 1",
    "max-autotune-no-cudagraphs": "default",
}
GIVEN = "from pathlib import Path\nfrom tests.support.given_names import *\n\n"
SMALL = {
    "pipeoffload-rehearse": "model=gpt_tiny model.width=16 model.context=16 data.context=16 "
    "model.depth=16 data.batch_size=32 trainer=cpu",
    "pipeoffload-odc": "",
}


def reason_of(language, text):
    """Return what runs a block, or why nothing does; None: nobody knows."""
    if language == "python":
        return next((why for line, why in NOT_RUN.items() if line in text), "test_a_program_runs")
    drawn = next((why for start, why in TEXTS.items() if text.lstrip().startswith(start)), None)
    lines = [line for line in text.splitlines() if line.strip()]
    is_command = all(any(re.match(start, line) for start in COMMANDS) for line in lines)
    return drawn or ("commands" if is_command else None)


def test_each_block_runs_or_has_a_reason():
    assert len(BLOCKS) > 60
    assert not [(page, text) for page, name, text in BLOCKS if reason_of(name, text) is None]


@pytest.mark.parametrize("table", [COMMANDS, TEXTS, NOT_RUN, METHODS, AROUND], ids=len)
def test_no_reason_is_left_over(table):
    texts = "\n".join(text for _, _, text in BLOCKS)
    assert not [
        start for start in table if start not in texts and not re.search(start, texts, re.MULTILINE)
    ]


LINES = [line for _, language, text in BLOCKS if not language for line in text.splitlines()]


@pytest.mark.parametrize(
    "line", [slow(line) for line in LINES if re.match("pipeoffload-(rehearse|odc)", line)]
)
def test_a_command_runs(line, tmp_path):
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, range(100, 400))))
    name, words = line.split(maxsplit=1)
    module = {"pipeoffload-odc": "minibatch_balance", "pipeoffload-rehearse": "rehearse"}[name]
    command = [sys.executable, "-m", f"lightning_pipeoffload.cli.{module}"]
    words = words.replace("model=gpt_small", "")
    assert output_of([*command, *shlex.split(f"{words} {SMALL[name]}")], tmp_path)


PROGRAMS = [
    (page, text)
    for page, language, text in BLOCKS
    if language == "python" and reason_of(language, text) == "test_a_program_runs"
]


def program_of(text):
    """Return a program with what stands around it."""
    form = next((form for line, form in AROUND.items() if line in text), "{code}")
    base, arguments = next((m for line, m in METHODS.items() if line in text), ("", ""))
    for large, small in SMALLER.items():
        text = text.replace(large, small)
    if "max_steps" not in text:
        text = re.sub(r"L\.Trainer\(", "L.Trainer(max_steps=4, ", text)
    before, _, last = text.rstrip().rpartition("\n")
    parts = {"before": before, "last": last, "first": before.partition("\n")[0], "code": text}
    parts |= {"method": textwrap.indent(text, "    "), "base": base, "arguments": arguments}
    return GIVEN + (METHOD if base else form).format(**parts)


def run(program, folder):
    (folder / "program.py").write_text(program)
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    output_of([sys.executable, "program.py"], folder, **environment)


TRAINING = [
    (page, text)
    for page, text in PROGRAMS
    if ".fit(" in text or any(line in text for line in (*METHODS, *AROUND))
]


@pytest.mark.slow
def test_programs_that_train_nothing_run(tmp_path):
    others = [text for page, text in PROGRAMS if (page, text) not in TRAINING]
    assert len(others) > 5
    run(program_of("\n".join(others)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "text"), TRAINING, ids=[page for page, _ in TRAINING])
def test_a_program_runs(page, text, tmp_path):
    run(program_of(text), tmp_path)
