"""What ``pipeoffload-plan model=...`` advises where a plan does not fit: the fastest that does."""

import re
from dataclasses import replace
from itertools import product

import pytest
from hydra import compose, initialize_config_dir

from lightning_pipeoffload.cli.configuration import configuration_directory
from lightning_pipeoffload.cli.model_plan import ModelPlanner
from lightning_pipeoffload.plan import plan
from lightning_pipeoffload.schedule import ScheduleError
from lightning_pipeoffload.schedule.candidates import options
from lightning_pipeoffload.schedule.make_plan import make_plan

MODEL = (
    *("model=gpt_tiny", "model.width=64", "model.heads=2", "model.dropout=0", "data.context=64"),
    *("data.batch_size=16", "model.depth=8", "num_microbatches=8", "format=json"),
)


def configured(*overrides):
    with initialize_config_dir(str(configuration_directory()), version_base=None):
        return compose("plan", overrides=[*MODEL, *overrides])


def needs(*overrides):
    """Return the bytes that the fullest rank needs."""
    config = configured(*overrides)
    planner = ModelPlanner(config)
    settings = planner.settings_named(config.strategy.schedule)
    return planner.estimate(settings, config.num_ranks).device


def fastest(*overrides):
    """Return the time of the fastest plan of all, none left out by a bound."""
    config = configured(*overrides)
    planner, found = ModelPlanner(config), []
    for count, way in product((8, 16), ("none", "cheap", "full")):
        wanted = options([count], recompute=[way])
        settings = replace(planner.settings, offload="auto")
        request = planner.request(wanted, config.num_ranks, settings)
        try:
            found.append(make_plan(request).best.score)
        except ScheduleError:
            continue
    return min(found)


@pytest.mark.parametrize(
    ("share", "asked"),
    [
        (0.9, ["num_ranks=2", "schedule=gpipe"]),
        (0.75, ["num_ranks=4", "schedule=zb_h2"]),
        (0.85, ["num_ranks=2", "schedule=zb_h1", "device=h100"]),
    ],
)
def test_what_is_advised_fits_and_nothing_faster_was_left_out(share, asked):
    memory = f"device_memory={int(share * needs(*asked))}"
    with pytest.raises(ScheduleError, match="; use .*: a step takes") as refusal:
        plan(configured(*asked, memory))
    words = re.search(r"; use (.*): a step takes", str(refusal.value))[1].split()
    advised = [*asked[:1], *asked[2:], memory, *words]
    if not any(word.startswith("schedule=") for word in words):
        advised.append(asked[1])
    assert needs(*advised) <= int(memory.partition("=")[2])
    planner = ModelPlanner(configured(*advised))
    settings = planner.settings_named(configured(*advised).strategy.schedule)
    option = settings.option(configured(*advised).num_microbatches)
    taken = make_plan(planner.request([option], configured(*advised).num_ranks, settings)).best
    # Plans within 1 % are about equal, and the planner leaves messages out of the memory.
    assert taken.score <= 1.05 * fastest(*asked, memory)


def test_more_ranks_are_named_only_where_nothing_fits():
    least = needs("num_ranks=8", "schedule=1f1b", "strategy.recompute=full", "num_microbatches=16")
    with pytest.raises(ScheduleError, match="; use num_ranks=[48] "):
        plan(configured("num_ranks=2", "schedule=1f1b", f"device_memory={int(1.1 * least)}"))
