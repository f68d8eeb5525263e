"""What is logged of steps, on which clock, and the picture of a chosen one."""

import csv
import json
import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipeoffload import PipelineMonitor, PipeOffloadStrategy
from lightning_pipeoffload.callbacks.step_figures import OptimizerStep
from lightning_pipeoffload.runtime.device import ActionTimer, TimedStep, timing
from lightning_pipeoffload.schedule import Action, Kind
from tests.support import fits

WIDTH, SAMPLES, NUM_STEPS = 8, 4, 6


class Net(L.LightningModule):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def training_step(self, batch, batch_idx):
        x = batch["x"]
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()

    def validation_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Fails(Net):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise ArithmeticError("here")
        return super().training_step(batch, batch_idx)


class Norms(L.Callback):
    """Computes the gradient's norm as a user's hook does."""

    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        grads = [p.grad for p in pl_module.parameters()]
        self.seen.append(float(nn.utils.get_total_norm(grads)))


def loader(**columns):
    samples = torch.randn(NUM_STEPS * SAMPLES, WIDTH)
    rows = [{"x": x, **{n: c[0] for n, c in columns.items()}} for x in samples]
    return DataLoader(rows, SAMPLES)


def fit(*callbacks, module=Net, data=None, strategy=None, **options):
    logger = fits.Journal()
    trainer = L.Trainer(
        **{**fits.SILENT, "num_sanity_val_steps": 0, "logger": logger, **options},
        devices=1,
        strategy=strategy or PipeOffloadStrategy(num_microbatches=2),
        callbacks=[*callbacks],
        enable_checkpointing=False,
        max_epochs=1,
        log_every_n_steps=2,
    )
    torch.manual_seed(0)
    trainer.fit(module(), loader() if data is None else data, loader())
    of_monitor = (
        (step, {name: value for name, value in metrics.items() if name.startswith("pipeline/")})
        for step, metrics in logger.entries
    )
    return {step: figures for step, figures in of_monitor if figures}


def test_every_nth_step_is_logged_with_its_number():
    norms = Norms()
    steps = fit(PipelineMonitor(), norms)
    assert [*steps] == [1, 3, 5]
    assert [steps[n]["pipeline/grad_norm"] for n in steps] == pytest.approx(norms.seen[1::2])
    first = steps[1]
    assert 0 < first["pipeline/step_seconds"] < first["pipeline/period_seconds"]
    assert 0 < first["pipeline/bubble"] < 1
    assert first["pipeline/rank_0/bubble"] == first["pipeline/bubble"]
    assert first["pipeline/rank_0/offloaded_bytes"] == 0
    assert first["pipeline/rank_0/peak_activation_bytes"] == 0  # too small to be counted
    assert "pipeline/period_seconds" not in steps[5]  # nothing follows


def count(figures, name):
    return figures[f"pipeline/{name}_per_second"] * figures["pipeline/period_seconds"]


class KnowsItsOperations(Net):
    flops_per_batch = 12345


class Frozen(Net):
    """A block without a gradient of its weight, after one without any."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.blocks[1].requires_grad_(False)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            x = self.encoder(batch["x"])
        return super().training_step({"x": x}, batch_idx)


@pytest.mark.parametrize(
    ("module", "operations"),
    [
        (Net, 3 * 4 * 2 * WIDTH * WIDTH * SAMPLES),
        (KnowsItsOperations, 12345),
        (Frozen, (1 + 3 + 2 + 3 + 3) * 2 * WIDTH * WIDTH * SAMPLES),
    ],
)
def test_samples_and_operations_are_those_of_a_batch(module, operations):
    figures = fit(PipelineMonitor(), module=module)[1]
    assert count(figures, "samples") == pytest.approx(SAMPLES)
    assert count(figures, "model_flops") == pytest.approx(operations)
    assert "pipeline/tokens_per_second" not in figures


IDS, MASK = torch.zeros(1, 5, dtype=torch.int64), torch.tensor([[1, 1, 1, 0, 0]])


@pytest.mark.parametrize(
    ("tokens", "columns", "num_tokens"),
    [
        (None, {"input_ids": IDS}, 5),
        (None, {"input_ids": IDS, "attention_mask": MASK}, 3),
        (None, {"input_ids": IDS, "attention_mask": MASK[None]}, 5),
        (lambda batch: batch["x"].numel(), {"input_ids": IDS}, WIDTH),
        (lambda batch: (batch["input_ids"] == 0).sum(), {"input_ids": IDS}, 5),
    ],
)
def test_tokens(tokens, columns, num_tokens):
    figures = fit(PipelineMonitor(tokens), data=loader(**columns))[1]
    assert count(figures, "tokens") == pytest.approx(num_tokens * SAMPLES)


class LongValidation(Net):
    now = 0

    def validation_step(self, batch, batch_idx):
        LongValidation.now += 1000


class CountingClock(timing.HostClock):
    """Each reading takes a second, and each batch of a validation a thousand."""

    def now(self):
        LongValidation.now += 1
        return LongValidation.now


@pytest.mark.parametrize("accumulate", [1, 2])
def test_validation_is_no_part_of_the_period(monkeypatch, accumulate):
    monkeypatch.setattr(timing, "HostClock", CountingClock)
    options = {"val_check_interval": 1, "accumulate_grad_batches": accumulate}
    steps = fit(PipelineMonitor(), module=LongValidation, **options)
    assert steps[1]["pipeline/step_seconds"] < 1000
    if accumulate == 1:
        assert steps[1]["pipeline/period_seconds"] < 1000


def test_the_chosen_step_is_drawn_next_to_its_plan(tmp_path, capsys):
    svg, trace = tmp_path / "step.svg", tmp_path / "step.json"
    fit(PipelineMonitor(step=3, timeline=[svg, str(trace)]), logger=False)
    text = svg.read_text()
    assert "Step 3 as measured: zb_h1" in text
    assert "Its plan" in text
    entries = json.loads(trace.read_text())["traceEvents"]
    assert sorted({entry["pid"] for entry in entries}) == [0, 1]
    assert "The timeline of step 3 is in" in capsys.readouterr().out


def test_a_step_that_never_comes_is_reported_and_drawn_by_the_next_fit(tmp_path):
    path = tmp_path / "step.svg"
    monitor = PipelineMonitor(step=NUM_STEPS, timeline=path)
    message = r"the fit ended after step 2, before step 6; choose an earlier step"
    with pytest.warns(UserWarning, match=message):
        fit(monitor, max_steps=2)
    assert not path.exists()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "PipelineMonitor")
        assert len(fit(monitor)) == 3
    assert path.exists()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere/step.svg", "make the folder .*nowhere first"),
        ("folder.json", "it is a folder; name a file"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_training(tmp_path, path, message):
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ValueError, match=f"PipelineMonitor cannot be written: {message}"):
        fit(PipelineMonitor(step=1, timeline=tmp_path / path), module=Fails)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"step": 1, "timeline": "a.pdf"},
            r"timeline \(a.pdf\) .* must end in .svg, .png or .json",
        ),
        ({"step": 1}, r"step \(1\) and timeline \(\(\)\) .* need each other"),
        ({"timeline": "a.svg"}, r"step \(None\) and timeline \(a.svg\) .* need each other"),
        ({"step": 0, "timeline": "a.svg"}, r"step \(0\) .* must be a whole number from 1 on"),
        ({"step": 2.5, "timeline": "a.svg"}, r"step \(2.5\) .* must be a whole number from 1 on"),
    ],
)
def test_invalid_arguments(given, message):
    with pytest.raises(ValueError, match=message):
        PipelineMonitor(**given)


def test_another_strategy_is_no_pipeline():
    with pytest.raises(ValueError, match='SingleDeviceStrategy; use strategy="pipeoffload"'):
        fit(PipelineMonitor(), strategy="auto")


def _fit_two_ranks(folder):
    torch.manual_seed(0)
    logger, norms = CSVLogger(folder, name="", version=""), Norms()
    paths = [f"{folder}/step.{ending}" for ending in ("svg", "json")]
    trainer = fits.trainer(
        2,
        {"schedule": "zb_h1"},
        logger=logger,
        max_epochs=1,
        accumulate_grad_batches=2,
        val_check_interval=3,
        log_every_n_steps=1,
        callbacks=[PipelineMonitor(step=4, timeline=paths), norms],
    )
    data = DataLoader([{"x": x} for x in torch.randn(10 * 128, 64)], 128)
    trainer.fit(Net(64), data, data)
    return norms.seen, trainer.strategy.plan.num_microbatches


def test_two_ranks_with_accumulation_and_validation(ranks, tmp_path):
    (norms, num_microbatches), _ = ranks(2).run(_fit_two_ranks, str(tmp_path))
    assert num_microbatches == 4
    with Path(tmp_path, "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["pipeline/grad_norm"]]
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3, 4]
    assert [float(row["pipeline/grad_norm"]) for row in rows] == pytest.approx(norms)
    own = [float(rows[3][f"pipeline/rank_{rank}/grad_norm"]) for rank in range(2)]
    assert sum(norm**2 for norm in own) == pytest.approx(norms[3] ** 2)
    assert all(float(rows[3][f"pipeline/rank_{n}/peak_activation_bytes"]) > 0 for n in range(2))
    periods = [row["pipeline/period_seconds"] for row in rows]
    assert [bool(period) for period in periods] == [True, True, True, True, False]
    entries = json.loads(Path(tmp_path, "step.json").read_text())["traceEvents"]
    waits = [entry for entry in entries if entry.get("cat") == "wait"]
    assert {wait["args"]["rank"] for wait in waits} == {0, 1}
    assert "clocks compared to" in Path(tmp_path, "step.svg").read_text()


TIMER = ActionTimer(torch.device("cpu"))


def plan_from(start):
    """Return a plan that takes ten seconds, of which six are work."""
    return TimedStep(start, start + 10, [(Action(Kind.F, 0, 0), [(start + 1, start + 7)], 1)])


@pytest.fixture
def step():
    """Make a step of two plans with a break of five seconds between them."""
    made = OptimizerStep(2, is_logged=True)
    made.plans += [plan_from(0), plan_from(16)]
    made.breaks.append((10, 15))
    made.add("samples", 4)
    made.add("samples", 3)
    return made


def test_a_step_has_a_period_if_another_one_follows_by_the_same_plan(step):
    alone = {"samples": 7, "step_seconds": 20}
    assert step.read(TIMER) == alone
    step.end_period(plan_from(29))
    assert step.read(TIMER) == {**alone, "period_seconds": 24, "bubble": 0.5}
    step.omit_period()  # the plan was made anew
    assert step.read(TIMER) == alone
