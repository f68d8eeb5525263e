"""Steps and hooks' calls that are not cut: all ranks run them, each block on its owner."""

from .whole_run import WholeRuns
