"""What is raised where code asks for a value that is not there."""

from __future__ import annotations


class ValueNeededError(BaseException):
    """Code asked for a value that exists on another stage only.

    Not an ``Exception``: a step's own ``except Exception`` would go on without the value.

    Attributes:
        origins: What the value was computed from, by name.
    """

    def __init__(self, operation: str, origins: frozenset[str]) -> None:
        super().__init__(f"{operation} needs the value of {describe_origins(origins)}")
        self.operation = operation
        self.origins = origins


def describe_origins(origins: frozenset[str]) -> str:
    """Name up to three origins in a readable way."""
    names = sorted(origins)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return "something computed from " + ", ".join(names[:3]) + more
