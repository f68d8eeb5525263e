"""Whether a run of the user's step is under way in this process, of whatever pipeline."""

from __future__ import annotations

_running: list[object] = []


def note_start(step_pass: object) -> None:
    """Say that a run of the step starts."""
    _running.append(step_pass)


def note_end() -> None:
    """Say that the last one that has started ends."""
    _running.pop()


def is_any_step_running() -> bool:
    """Whether one is under way: code outside is a hook, or another script's."""
    return bool(_running)
