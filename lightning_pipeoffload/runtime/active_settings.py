"""Settings of the running step for callbacks of torch, to which no argument can be passed.

torch calls dispatcher kernels, operations on tensors without a value and checkpoints with its own
arguments. They read the settings of the step here::

    set by                    read by                              type
    F, B of a stage           kernels.py, node.py, the user's      WeightGradQueue: where weight
                              kernels by defer_weight_grad         gradients go
    every run of a step       ShapeOnly, at each operation         StepRules: values to observe, to
                                                                   make up and to drop
    a trace, a measurement    chunked_loss, around its chunks      ChunkCallbacks: counts their work
    of bytes by shapes                                             and memory
    F, a checkpoint's rerun   torch.utils.checkpoint, at each call CheckpointChecker: compares both
    a block on a slice of the scaled_dot_product_attention         BlockOnSlice: keys to attend to
    sequence

The settings are global to the process, not to a thread or a context: on an accelerator autograd
runs a backward that the user's step starts in another thread, which has to read the same settings.
A process runs one action of one step at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

_Setting = TypeVar("_Setting")


class ActiveSettings:
    """A stack of settings for each type of setting."""

    def __init__(self) -> None:
        self._settings: defaultdict[type, list[Any]] = defaultdict(list)

    def stack(self, kind: type[_Setting]) -> list[_Setting]:
        """Return the settings of a type, the current one last, for code that every action calls."""
        return self._settings[kind]

    def latest(self, kind: type[_Setting]) -> _Setting | None:
        """Return the current setting of a type; None if there is none."""
        settings = self._settings[kind]
        return settings[-1] if settings else None

    @contextmanager
    def during(self, setting: object) -> Iterator[None]:
        """Make ``setting`` the current one of its type within the context."""
        settings = self._settings[type(setting)]
        settings.append(setting)
        try:
            yield
        finally:
            settings.pop()


ACTIVE_SETTINGS = ActiveSettings()
"""The settings of this process."""
