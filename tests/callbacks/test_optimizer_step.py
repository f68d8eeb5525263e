"""What a rank measures of an optimizer step."""

import pytest
import torch

from lightning_pipeoffload.callbacks.step_figures import OptimizerStep
from lightning_pipeoffload.runtime.timing import ActionTimer, TimedStep
from lightning_pipeoffload.schedule import Action, Kind

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
    step.follow_with(plan_from(29))
    assert step.read(TIMER) == {**alone, "period_seconds": 24, "bubble": 0.5}
    step.has_period = False  # the plan was made anew
    assert step.read(TIMER) == alone
