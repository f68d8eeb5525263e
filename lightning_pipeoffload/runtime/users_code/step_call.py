"""What a call of the user's step is for: who makes the call knows, and says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StepCall:
    """What one call of the user's step is for.

    Attributes:
        is_probe: It is looked at, and has no values.
        is_last: It comes to the step's end: its result counts, and what it logs.
        is_last_local: No call of this rank comes farther with the same microbatch.
    """

    is_probe: bool = False
    is_last: bool = False
    is_last_local: bool = False


PROBE = StepCall(is_probe=True)

UsersStep = Callable[[Any, StepCall], Any]
"""Calls the user's step on a microbatch."""
