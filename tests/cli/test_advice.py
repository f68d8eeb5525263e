"""What ``pipeoffload-plan model=...`` advises where a plan does not fit: the fastest that does."""

import json
import re
from dataclasses import replace

import pytest

from lightning_pipeoffload.cli import advice
from lightning_pipeoffload.cli.layouts import PlannedLayout
from lightning_pipeoffload.cli.model_planner import ModelPlanner
from lightning_pipeoffload.plan import plan
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.schedule import PlanOption, ScheduleError, make_plan, options
from tests.support.composed import composed
from tests.support.pairs import slow

SIZES = ("data.batch_size=8", "num_microbatches=4", "format=json")
GPT = ("model=gpt_tiny", "model.heads=2", "model.dropout=0", "data.context=64")
SMALL = (*GPT, *SIZES, "model.width=64", "model.depth=8")
WIDE = (*GPT, *SIZES, "model.width=128", "model.depth=4")
BY_SGD = (
    *("+model._target_=tests.cli.test_model_estimate.LateGPT", "+model.width=64"),
    *("data.context=256", *SIZES),
)


# With no device, times are told in those of the schedule that was asked for.
ADVICE = r"; use .*: a step takes (\d\.\d\d times as long as \w+ would|.*s)$"


def needed(planner, config):
    settings = planner.settings_named(config.strategy.schedule)
    return planner.estimate(settings, config.num_ranks).fullest_rank.device


def fastest(planner, num_ranks):
    """Return the time of the fastest plan of all that fit, none left out by a bound."""
    found = []
    for sharding in ("none", "optimizer"):
        wanted = options([4, 8], recompute=["none", "cheap", "full"])
        settings = replace(planner.settings, offload="auto", sharding=sharding)
        try:
            request = planner.with_settings(settings).request(wanted, num_ranks)
            found.append(make_plan(request).best.score)
        except ScheduleError:
            continue
    return min(found)


@pytest.mark.parametrize(
    ("model", "share", "asked"),
    [
        slow((SMALL, 0.9, ["schedule=gpipe", "num_ranks=2"])),
        slow((SMALL, 0.75, ["schedule=zb_h2", "num_ranks=4"])),
        slow((SMALL, 0.85, ["schedule=zb_h1", "num_ranks=2", "device=h100"])),
        slow((WIDE, 0.6, ["schedule=1f1b", "num_ranks=2", "+strategy.data_parallel_size=2"])),
        slow((BY_SGD, 0.9, ["schedule=1f1b", "num_ranks=2"])),
    ],
)
def test_what_is_advised_fits_and_nothing_faster_was_left_out(model, share, asked, capsys):
    config = composed("plan", *model, *asked)
    limit = int(share * needed(ModelPlanner(config), config))
    memory = f"device_memory={limit}"
    with pytest.raises(ScheduleError, match=ADVICE) as refusal:
        plan(composed("plan", *model, *asked, memory))
    words = re.search(r"; use (.*): a step takes", str(refusal.value))[1].split()
    assert not any("num_ranks" in word for word in words)
    given = asked[1:] if any(word.startswith("schedule=") for word in words) else asked
    advised = composed("plan", *model, *given, memory, *words)
    plan(advised)
    figures = json.loads(capsys.readouterr().out)
    if "memory" in figures:
        assert max(figures["memory"]["device"]) <= limit
    else:
        assert figures["taken_by_weights"] + max(figures["peak_memory"]) <= limit
    planner = ModelPlanner(advised)
    settings = planner.settings_named(advised.strategy.schedule)
    option = settings.option(advised.num_microbatches)
    request = planner.with_settings(settings).request([option], advised.num_ranks)
    taken = make_plan(request).best
    # Plans within 1 % are about equal, and the planner leaves messages out of the memory.
    assert taken.score <= 1.05 * fastest(planner, advised.num_ranks)


@pytest.mark.slow
def test_more_ranks_are_named_only_where_nothing_fits():
    sizes = "num_microbatches=2", "data.batch_size=2", "model.width=64", "model.depth=8"
    asked = *GPT, "schedule=1f1b", *sizes
    config = composed("plan", *asked, "num_ranks=8", "strategy.recompute=full")
    memory = f"device_memory={int(1.1 * needed(ModelPlanner(config), config))}"
    with pytest.raises(ScheduleError, match="; use num_ranks=[48] "):
        plan(composed("plan", *asked, "num_ranks=2", memory))


def test_the_words_for_a_head_in_b_are_understood():
    config = composed("plan", *WIDE, "num_ranks=2", "schedule=zb_h1", "device_memory=1GiB")
    planner = ModelPlanner(config).with_settings(PipelineSettings(num_microbatches=4))
    option = PlanOption("zb_h1", 1, 4, head_weight_grad="B")
    plan, needs = planner.plan(planner.request([option], 2))
    planned = PlannedLayout(planner, plan, needs)
    asked = planner.settings_named("zb_h1")
    proposal = advice.simplest_proposal(planned, asked, config, {})
    assert proposal.words == ("+strategy.head_weight_grad=B",)
    advised = ModelPlanner(composed("plan", *WIDE, "num_ranks=2", *proposal.words))
    assert advised.settings.head_weight_grad == "B"
