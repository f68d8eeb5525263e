"""What ``pipeoffload-train`` makes of errors."""

from types import SimpleNamespace

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from lightning_pipeoffload.schedule import ScheduleError
from lightning_pipeoffload.train import refusals_on_rank_zero


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
