"""The parameters of the optimizers: the whole module's, of which a rank trains its own.

Code that freezes, unfreezes and groups parameters (``configure_optimizers``, a callback) is the
same on every rank and refers to the whole module's. Once the module is split, it sees those of
other ranks as shapes.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

from lightning_pipeoffload.optimizers.narrowed_optimizer import (
    NarrowedOptimizer,
    StepShares,
    forget_states,
    narrow_steps,
)
from lightning_pipeoffload.optimizers.optimizer_state import (
    GroupNames,
    fill_groups,
    follow_parameters,
    name_groups,
    read_states,
)
from lightning_pipeoffload.optimizers.optimizer_table import refuse_optimizer
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.runtime.shapes.remote_tensor import RemoteTensor


class OptimizedParameters:
    """The parameters of each optimizer, and those of them that this rank trains.

    Args:
        pipeline: This rank's part of the module.
        group: The pipeline's processes.
        optimizers: A function that returns the trainer's optimizers, which every fit makes anew.
        num_sharing: The number of replicas that divide steps and optimizer state.
        is_declared: The user's ``per_parameter_optimizer``.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        group: PipelineGroup,
        optimizers: Callable[[], list[Optimizer]],
        num_sharing: int = 1,
        is_declared: bool = False,
    ) -> None:
        self._pipeline = pipeline
        self._group = group
        self._optimizers = optimizers
        self._narrowed: list[NarrowedOptimizer] = []
        self._num_sharing = num_sharing
        self._is_declared = is_declared

    @property
    def names(self) -> list[GroupNames]:
        """Names of the whole module's parameters in each group of each optimizer."""
        self._adopt()
        return name_groups(self._optimizers(), self._pipeline.module)

    def names_in(self, optimizer: Optimizer) -> GroupNames:
        """Return the names in each group of one of the trainer's optimizers."""
        self._adopt()
        return name_groups([optimizer], self._pipeline.module)[0]

    def named(self) -> list[tuple[Optimizer, GroupNames]]:
        """Return each optimizer with the names in each of its groups."""
        return list(zip(self._optimizers(), self.names, strict=True))

    def narrow_steps(self) -> None:
        """Narrow steps to this rank's parameters, even where a closure splits the module.

        Raises:
            ValueError: An optimizer's step may depend on its other parameters.
        """
        if self._group.world_size == 1:
            return
        num_ranks, num_sharing = self._group.num_ranks, self._num_sharing
        for optimizer in self._optimizers() if num_ranks * num_sharing > 1 else ():
            refuse_optimizer(optimizer, num_ranks, num_sharing, self._is_declared)
        age = self._pipeline.gradient_age
        self._narrowed = [narrow_steps(optimizer, age) for optimizer in self._optimizers()]

    def start_training(self) -> None:
        """Run after the hooks that were registered with the optimizers since."""
        for narrowed in self._narrowed:
            narrowed.come_last()

    def leave_remote(self) -> None:
        """Drop what other ranks own; called once, before the first training step."""
        names = self.names
        self._bring_states()
        self._pipeline.commit()
        fill_groups(self._optimizers(), self._pipeline.module, names)
        self._refuse_lost_states()
        self.forget_remote()
        for optimizer in self._optimizers():
            read_states(optimizer)
            if self._pipeline.device.type != "cpu" and optimizer.state:
                follow_parameters(optimizer)

    def _adopt(self) -> None:
        """Put parameters into the groups that the first batch has brought to this rank."""
        for narrowed in self._narrowed:
            narrowed.adopt()

    def _bring_states(self) -> None:
        """Send the states of parameters that have moved to other ranks."""
        parts = self._pipeline.parts
        for name, source in parts.moved.items() if parts is not None else ():
            parameter = self._pipeline.module.get_parameter(name)
            for optimizer in self._optimizers():
                state = optimizer.state.get(parameter)
                state = self._group.broadcast(state, self._group.global_ranks[source])
                if state and not isinstance(parameter, RemoteTensor):
                    optimizer.state[parameter] = state

    def forget_remote(self) -> None:
        """Drop the optimizer state of parameters of other ranks and replicas."""
        own = {id(p) for p in self._pipeline.tensors.canonical_parameters().values()}
        for optimizer in self._optimizers():
            forget_states(optimizer, lambda p: id(p) not in own)
        if self._pipeline.committed:
            for narrowed in self._narrowed:
                is_shared_out = self._num_sharing > 1 and narrowed.optimizer.param_groups
                narrowed.share_out(StepShares(self._group) if is_shared_out else None)

    def shares_of(self, optimizer: Optimizer) -> StepShares | None:
        """Return the parameters of each replica; None where all replicas step all."""
        found = [n.shares for n in self._narrowed if n.optimizer is optimizer]
        return found[0] if found else None

    def _refuse_lost_states(self) -> None:
        """Refuse an optimizer of an earlier fit whose states stayed on another rank.

        Raises:
            RuntimeError: This rank trains a parameter that another rank trained before.
        """
        own = self._pipeline.tensors.canonical_parameters()
        names = {id(parameter): name for name, parameter in own.items()}
        stateless = [p for narrowed in self._narrowed for p in narrowed.stateless]
        lost = [names[id(p)] for p in stateless if id(p) in names]
        lost_anywhere = [name for names in self._group.gather(lost) for name in names]
        if lost_anywhere:
            raise RuntimeError(
                f"{lost_anywhere[0]} was trained on another rank before, and what the optimizer "
                f"knew of it is there: let configure_optimizers make a new optimizer for this fit, "
                f"resume from a checkpoint, or keep the settings that cut the module"
            )
