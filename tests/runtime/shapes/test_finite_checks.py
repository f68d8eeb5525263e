"""A step without values runs as if all values were finite."""

import pytest
import torch

from lightning_pipeoffload.runtime import ACTIVE_SETTINGS
from lightning_pipeoffload.runtime.shapes import EVERYTHING, NO_ALARM, ShapeOnly, StepRules

FINITE = {
    "isfinite": lambda x: torch.isfinite(x).all(),
    "method": lambda x: x.isfinite().all(dim=1)[0],
    "not isnan": lambda x: not torch.isnan(x).any(),
    "~": lambda x: (~torch.isnan(x)).all(),
    "or": lambda x: not (torch.isnan(x) | torch.isinf(x)).any(),
    "and": lambda x: torch.logical_and(torch.isfinite(x), ~x.isinf()).any(),
    "count": lambda x: (~torch.isfinite(x)).sum() == 0,
    "full count": lambda x: torch.isfinite(x).sum().item() == x.numel(),
    "share": lambda x: torch.isnan(x).float().mean().item() < 0.5,
    "itself": lambda x: (x == x).all() and not (x != x).any(),
    "infinity": lambda x: (x.abs() < float("inf")).all(),
    "several": lambda x: torch.stack([x.sum().isfinite(), x.mean().isfinite()]).all(),
    "equals": lambda x: x.isfinite().all() == True,  # noqa: E712
}


@pytest.mark.parametrize("assumed", [EVERYTHING, NO_ALARM])
@pytest.mark.parametrize("check", FINITE)
def test_values_are_finite(check, assumed):
    values = ShapeOnly.like(torch.ones(3, 4), "a block")
    rules = StepRules(observe=lambda *_: None, assume_value=lambda: assumed)
    with ACTIVE_SETTINGS.during(rules):
        assert FINITE[check](values)


def test_what_is_written_is_no_outcome_any_more():
    rules = StepRules(observe=lambda *_: None, assume_value=lambda: EVERYTHING)
    with ACTIVE_SETTINGS.during(rules):
        mask = torch.isnan(ShapeOnly.like(torch.ones(3), "a block"))
        mask |= ShapeOnly.like(torch.ones(3, dtype=torch.bool), "another")
        assert mask.all()
