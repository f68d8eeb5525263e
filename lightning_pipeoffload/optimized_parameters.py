"""The parameters that a rank's optimizers have: the whole module's until it is split, then its own.

Code that freezes, unfreezes and groups parameters (``configure_optimizers``, a callback at an
epoch's start) is the same on every rank and means the whole module's; it sees them all, later on as
shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

from lightning_pipeoffload.optimizer_groups import (
    GroupNames,
    fill_groups,
    keep_parameters,
    name_groups,
)
from lightning_pipeoffload.optimizer_state import follow_parameters
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.runtime.shape_only import ShapeOnly, ValueNeededError
from lightning_pipeoffload.runtime.users_code import in_brackets, users_line


class OptimizedParameters:
    """Which parameters of the whole module each optimizer has, and which of them this rank trains.

    Args:
        pipeline: this rank's part of the module.
        optimizers: returns the trainer's, which every fit makes anew.

    Attributes:
        names: of the whole module's parameters, in each group of each optimizer.
    """

    def __init__(self, pipeline: Pipeline, optimizers: Callable[[], list[Optimizer]]) -> None:
        self._pipeline = pipeline
        self._optimizers = optimizers
        self.names: list[GroupNames] = []

    def names_in(self, optimizer: Optimizer) -> GroupNames:
        """Return the names in each group of one of the trainer's optimizers."""
        return self.names[[id(known) for known in self._optimizers()].index(id(optimizer))]

    def named(self) -> list[tuple[Optimizer, GroupNames]]:
        """Return each optimizer with the names in each of its groups."""
        return list(zip(self._optimizers(), self.names, strict=True))

    @contextmanager
    def shown_whole(self) -> Iterator[None]:
        """Let code that every rank runs freeze, unfreeze and group the parameters of all stages.

        Raises:
            RuntimeError: the code needs the value of a parameter that this rank does not own.
        """
        module = self._pipeline.module
        try:
            with self._pipeline.shown_whole():
                if self._pipeline.committed:
                    fill_groups(self._optimizers(), module, self.names)
                yield
                self.names = name_groups(self._optimizers(), module)
        except ValueNeededError as error:
            raise RuntimeError(
                f"{error}{in_brackets(users_line(error))}, which is on another rank; where "
                f"parameters are frozen or grouped, only names and shapes of all are known"
            ) from None
        if self._pipeline.committed:
            for optimizer in self._optimizers():
                keep_parameters(optimizer, lambda p: not isinstance(p, ShapeOnly))

    def keep_own(self) -> None:
        """Before the first training step: leave what other ranks own to them, for good."""
        self.names = name_groups(self._optimizers(), self._pipeline.module)
        self._pipeline.commit()
        kept = {id(p) for p in self._pipeline.tensors.canonical_parameters().values()}
        for optimizer in self._optimizers():
            keep_parameters(optimizer, lambda p: id(p) in kept)
            if self._pipeline.device.type != "cpu" and optimizer.state:
                follow_parameters(optimizer)
