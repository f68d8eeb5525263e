"""Simulation of a plan before it runs: seconds of every lane, memory of every rank."""

from .memory import (
    Curve,
    host_memory_curves,
    key_value_changes,
    memory_curves,
    peak_host_memory,
    peak_memory,
)
from .simulate import steady_period
