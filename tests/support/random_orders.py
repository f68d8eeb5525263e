"""Random schedules that are valid: a random walk through what may run next."""

from __future__ import annotations

import random

from lightning_pipeoffload.schedule import Action, Kind, Schedule, validate


def random_schedule(stage_ranks: tuple[int, ...], num_microbatches: int, seed: int) -> Schedule:
    """Put F, B and W of every stage and microbatch into any order that respects what waits."""
    draw = random.Random(seed)
    ranks: list[list[Action]] = [[] for _ in range(max(stage_ranks) + 1)]
    ready = [Action(Kind.F, 0, microbatch) for microbatch in range(num_microbatches)]
    while ready:
        action = ready.pop(draw.randrange(len(ready)))
        ranks[stage_ranks[action.stage]].append(action)
        ready.extend(_released_by(action, len(stage_ranks) - 1))
    schedule = Schedule.of(ranks, f"random {seed}")
    validate(schedule)
    return schedule


def _released_by(action: Action, last_stage: int) -> list[Action]:
    kind, stage, microbatch = action
    if kind is Kind.F and stage < last_stage:
        return [Action(Kind.F, stage + 1, microbatch)]
    if kind is Kind.F:
        return [Action(Kind.B, stage, microbatch)]
    if kind is Kind.B:
        upstream = [Action(Kind.B, stage - 1, microbatch)] if stage else []
        return [Action(Kind.W, stage, microbatch), *upstream]
    return []
