"""Pipeline schedules as data: built, checked, lowered, simulated and drawn without torch."""

from .actions import COMPUTE, MEMORY_EFFECTS, TRANSFERS, Action, Kind, MemoryEffect, ScheduleError
from .build import SCHEDULES, Recipe, accept, build
from .costs import Costs
from .draw import draw
from .schedule import Schedule
from .simulate import peak_memory, simulate
from .timeline import Event, Timeline
from .transfer import (
    add_transfers,
    forward_only,
    keep_microbatches,
    lower,
    split_fused_backward,
)
from .validate import validate

__all__ = [
    "COMPUTE",
    "MEMORY_EFFECTS",
    "SCHEDULES",
    "TRANSFERS",
    "Action",
    "Costs",
    "Event",
    "Kind",
    "MemoryEffect",
    "Recipe",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "accept",
    "add_transfers",
    "build",
    "draw",
    "forward_only",
    "keep_microbatches",
    "lower",
    "peak_memory",
    "simulate",
    "split_fused_backward",
    "validate",
]
