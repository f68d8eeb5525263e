"""Passes: functions that make a plan of a schedule, step by step."""

from .offload import offload_activations
from .transfer import as_executed
