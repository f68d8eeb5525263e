"""How a run comes to its plan, with costs that are told instead of measured."""

from unittest.mock import MagicMock

import pytest
import torch

from lightning_pipeoffload.loop.auto_choice import AutoChoice, Chosen
from lightning_pipeoffload.loop.run_plans import RunPlans
from lightning_pipeoffload.planning.limits import MachineLimits
from lightning_pipeoffload.planning.plan_request import request_by_name
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.schedule import (
    Costs,
    ScheduleError,
    build,
    peak_memory,
    split_fused_backward,
)
from lightning_pipeoffload.schedule.make_plan import make_plan

NO_LIMITS = MachineLimits()


def costs(copies):
    return Costs(1.0, 1.0, 1.0, activation=1.0, offload=copies, reload=copies)


def plans_of(monkeypatch, name, before, after):
    """Return the plans of a run that chose a family by some costs, and has measured others."""
    options = {"memory_limit": 3, "num_chunks": 2, "num_microbatches": 8}
    settings = PipelineSettings(schedule=name, **options)
    plan = make_plan(request_by_name(settings, 4, 8, before, NO_LIMITS))
    chosen = Chosen(settings, plan, NO_LIMITS, is_measured=True)
    monkeypatch.setattr(AutoChoice, "choose", lambda *_: chosen)
    pipeline, group, measurements = MagicMock(), MagicMock(num_ranks=4, num_replicas=1), MagicMock()
    pipeline.device, pipeline.is_split = torch.device("cpu"), True
    pipeline.tensors.ranks_sharing.return_value = {}
    pipeline.ownership.owners = {}
    group.world.broadcast = lambda value, root: value
    measurements.gather_costs.return_value = after
    measurements.gather_limits.return_value = NO_LIMITS
    plans = RunPlans(PipelineSettings(**options), pipeline, MagicMock(), group, measurements)
    plans.report = MagicMock(needs=None)
    plans.choose(MagicMock(), 8)
    plans.begin()
    return plans


def test_what_was_chosen_stays_where_it_fits_though_its_family_no_longer_does(monkeypatch):
    fast, slow = costs(0.9), costs(1.2)
    with pytest.raises(ScheduleError, match="less than the 4"):
        build("po_f", 4, 8, 2, slow, memory_limit=3)
    plans = plans_of(monkeypatch, "po_f", fast, slow)
    plans.before_plan(is_first=True)
    used = plans.training.schedule
    assert max(peak_memory(split_fused_backward(used), slow)) <= 3
    assert plans.training.costs == slow
    assert plans.settings.schedule == used.name
