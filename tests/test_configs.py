"""What the command line composes is what the package takes."""

import subprocess
import sys
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy

from lightning_pipeoffload import OnDemandStrategy, PipeOffloadStrategy
from lightning_pipeoffload.schedule import SCHEDULES, ScheduleError
from lightning_pipeoffload.train import build_trainer, main, refusals_on_rank_zero

CONF = Path(__file__).parents[1] / "conf"


@pytest.fixture(autouse=True)
def _hydra_errors_are_short(monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")


def names(group):
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def train_config(*overrides):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", overrides=["output_dir=.", *overrides])


@pytest.mark.parametrize(
    ("group", "kind"), [("model", LightningModule), ("data", LightningDataModule)]
)
def test_models_and_data_are_built(group, kind):
    for name in names(group):
        with torch.device("meta"):
            assert isinstance(instantiate(train_config(f"{group}={name}")[group]), kind)


def test_every_schedule_and_offload_has_its_option_which_reaches_the_strategy():
    assert {*names("schedule")} == {*SCHEDULES, "auto"}
    for name in names("schedule"):
        config = train_config(f"schedule={name}").strategy
        assert config.schedule == name
        assert isinstance(instantiate(config), PipeOffloadStrategy)
    for name in names("offload"):
        assert train_config(f"offload={name}").strategy.offload == name


def test_trainers_clusters_and_experiments_are_composed():
    for name in names("trainer"):
        trainer = build_trainer(train_config(f"trainer={name}", "trainer.accelerator=cpu"))
        assert isinstance(trainer, Trainer)
        assert trainer.max_steps == 400
    for name in names("cluster"):
        assert train_config(f"cluster={name}").trainer.num_nodes == 1
    for name in names("experiment"):
        assert train_config(f"experiment={name}") != train_config()


def test_a_flag_or_null_leaves_a_callback_out():
    of_config = {"TQDMProgressBar", "ModelCheckpoint"}
    for flag in ("enable_progress_bar", "enable_checkpointing"):
        trainer = build_trainer(train_config("trainer=cpu", f"trainer.{flag}=false"))
        assert len(of_config & {type(callback).__name__ for callback in trainer.callbacks}) == 1
    trainer = build_trainer(train_config("trainer=cpu", "callbacks.checkpoint=null"))
    assert trainer.checkpoint_callback is None or not trainer.checkpoint_callback.dirpath


def test_loggers_are_one_or_several():
    def loggers(*overrides):
        return [type(found).__name__ for found in build_trainer(train_config(*overrides)).loggers]

    assert loggers("trainer=cpu") == ["CSVLogger"]
    assert loggers("trainer=cpu", "logger=none") == []


@pytest.mark.parametrize(("given", "expected"), [([], 3), (["trainer.num_nodes=2"], 2)])
def test_the_nodes_are_those_of_the_allocation_unless_they_are_given(given, expected, monkeypatch):
    monkeypatch.setenv("SLURM_NNODES", "3")
    assert train_config(*given).trainer.num_nodes == expected


def test_a_requeued_job_writes_a_log_of_its_own(monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert train_config().logger.csv.version == "1"


def test_every_argument_of_the_strategy_is_at_its_default():
    parameters = signature(PipeOffloadStrategy.__init__).parameters.values()
    given_by_the_trainer = signature(ParallelStrategy.__init__).parameters
    defaults = {p.name: p.default for p in parameters if p.name not in given_by_the_trainer}
    assert instantiate(train_config().strategy, _target_="builtins.dict") == defaults


def test_the_second_strategy_has_its_own_arguments_and_no_pipeline_s():
    parameters = signature(OnDemandStrategy.__init__).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.name != "self"}
    config = train_config("strategy=odc").strategy
    assert instantiate(config, _target_="builtins.dict") == defaults
    assert isinstance(instantiate(config), OnDemandStrategy)


WRONG_OVERRIDES = {
    "trainer.nonsense=1": "nonsense",
    "nonsense=1": "nonsense",
    "schedule=nonsense": "nonsense",
    "strategy.schedule=nonsense": "nonsense",
    "strategy.num_microbatches=many": "many",
    "model.heads=5": "heads (5)",
    "trainer.max_steps=-1": "max_steps (-1)",
    "trainer.max_steps=abc": "model: ",
    "trainer.devices=": "devices",
    "data.batch_size=0": "batch_size (0)",
}


@pytest.mark.parametrize("override", WRONG_OVERRIDES)
def test_wrong_override_ends_with_status_2_and_one_line(override, monkeypatch, capfd, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pipeoffload-train", "trainer.accelerator=cpu", override])
    with pytest.raises(SystemExit) as exit_status:
        main()
    lines = capfd.readouterr().err.splitlines()
    assert exit_status.value.code == 2
    assert len(lines) == 1, lines
    assert WRONG_OVERRIDES[override] in lines[0]
    assert list(tmp_path.iterdir()) == []


TINY = [
    *("trainer=cpu", "trainer.max_steps=2", "+trainer.limit_val_batches=1", "data.batch_size=4"),
    *("model.width=16", "model.depth=2", "model.heads=2", "data.context=16"),
]


def run_train(folder, *overrides):
    command = [sys.executable, "-m", "lightning_pipeoffload.train", *TINY, *overrides]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1000)


def test_two_ranks_get_the_same_overrides_and_leave_one_checkpoint(tmp_path):
    done = run_train(tmp_path, "schedule=1f1b")
    assert done.returncode == 0, done.stderr
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == ["outputs"]
    (folder,) = (tmp_path / "outputs").glob("*/*")
    assert sorted(path.name for path in folder.iterdir()) == [".hydra", "checkpoints", "logs"]
    assert "schedule: 1f1b" in (folder / ".hydra" / "config.yaml").read_text()
    (checkpoint,) = (folder / "checkpoints").iterdir()
    saved = torch.load(checkpoint, weights_only=False)
    assert saved["hyper_parameters"]["width"] == 16
    assert "blocks.0.attention.qkv.weight" in saved["state_dict"]


@pytest.mark.slow
def test_a_model_that_cannot_be_cut_is_refused_in_one_line(tmp_path):
    done = run_train(tmp_path, "model.depth=1")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    assert "block" in lines[-1]
    assert lines.count(lines[-1]) == 1


@pytest.mark.slow
def test_a_sweep_runs_its_jobs_one_after_the_other(tmp_path):
    tiny = ("trainer.devices=1", "trainer.max_steps=1", "test=true", "callbacks.checkpoint=null")
    done = run_train(tmp_path, *tiny, "-m", "model.depth=2,0")
    assert done.returncode == 1, done.stderr
    (sweep,) = (tmp_path / "multirun").glob("*/*")
    assert [path.name for path in tmp_path.iterdir()] == ["multirun"]
    assert (sweep / "0" / "logs" / "metrics.csv").read_text().count("test_loss") == 1
    last = done.stderr.splitlines()[-1]
    assert "job 1 (" in last
    assert "model.depth=0 " in last
    assert ") ended with status 2; its folder is" in last


# What pipeoffload-train makes of errors


@pytest.mark.parametrize(
    ("step", "is_rank_zero", "error", "expected"),
    [
        (0, True, ValueError("no"), ValueError),
        (0, False, ValueError("no"), SystemExit),
        (3, True, ValueError("no"), RuntimeError),
        (3, False, ValueError("no"), RuntimeError),
        (3, True, ScheduleError("memory_limit"), ScheduleError),
        (3, False, ScheduleError("memory_limit"), SystemExit),
    ],
)
def test_what_cannot_be_is_refused_once(step, is_rank_zero, error, expected):
    strategy = SimpleNamespace(cluster_environment=LightningEnvironment())
    trainer = SimpleNamespace(global_step=step, is_global_zero=is_rank_zero, strategy=strategy)
    with pytest.raises(expected), refusals_on_rank_zero(trainer):
        raise error


def test_a_rank_that_others_may_end_says_why_itself(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    strategy = SimpleNamespace(cluster_environment=TorchElasticEnvironment())
    trainer = SimpleNamespace(global_step=0, is_global_zero=False, strategy=strategy)
    with pytest.raises(ValueError, match="why"), refusals_on_rank_zero(trainer):
        raise ValueError("why")
