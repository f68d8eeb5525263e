"""The parameters of the optimizers: those of the whole module; each rank trains its own.

Code that freezes, unfreezes and groups parameters (``configure_optimizers``, a callback) is the
same on every rank and refers to the whole module's. Once the module is split, remote parameters are
shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeoffload.optimizers.host_step import EarlyStep, HostStep
from lightning_pipeoffload.optimizers.master_step import MasterStep
from lightning_pipeoffload.optimizers.master_weights import MasterWeights, is_half
from lightning_pipeoffload.optimizers.narrowed_optimizer import (
    NarrowedOptimizer,
    OptimizerPartition,
    forget_states,
    narrow_steps,
)
from lightning_pipeoffload.optimizers.optimizer_state import (
    GroupNames,
    name_groups,
    set_group_parameters,
)
from lightning_pipeoffload.optimizers.optimizer_table import (
    estimate_state_bytes,
    may_step_by_bucket,
    refuse_non_elementwise,
    refuse_optimizer,
    refuse_stand_ins,
)
from lightning_pipeoffload.optimizers.stand_in_step import StandInStep, loading_stand_in_state
from lightning_pipeoffload.runtime import tensors_in
from lightning_pipeoffload.runtime.memory import HostMemory, gradient_bytes, staging_bytes
from lightning_pipeoffload.runtime.run import Pipeline
from lightning_pipeoffload.runtime.shapes import RemoteTensor, has_partial_gradient
from lightning_pipeoffload.schedule import bytes_text


class OptimizedParameters:
    """The parameters of each optimizer, and the subset that this rank trains.

    Args:
        pipeline: This rank's part of the module.
        optimizers: Returns the trainer's optimizers, which every fit makes again.
        num_optimizer_shards: The number of replicas that divide steps and optimizer state.
        is_declared: The user's ``per_parameter_optimizer``.
        on_host: Whether optimizers step on the host.
        masters: The masters that they step; None: they step the parameters themselves.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizers: Callable[[], list[Optimizer]],
        num_optimizer_shards: int = 1,
        is_declared: bool = False,
        on_host: bool = False,
        masters: MasterWeights | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._group = pipeline.group
        self._optimizers = optimizers
        self._narrowed: list[NarrowedOptimizer] = []
        self._num_sharing = num_optimizer_shards
        self._is_declared = is_declared
        self._on_host, self._masters = on_host, masters
        self._shares: OptimizerPartition | None = None

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers, with the parameters that have been moved to this rank."""
        self._add_moved_parameters()
        return self._optimizers()

    @property
    def names(self) -> list[GroupNames]:
        """Names of the whole module's parameters in each group of each optimizer."""
        return name_groups(self.optimizers(), self._pipeline.module)

    def names_in(self, optimizer: Optimizer) -> GroupNames:
        """Return the names in each group of one of the trainer's optimizers."""
        self._add_moved_parameters()
        return name_groups([optimizer], self._pipeline.module)[0]

    def optimizers_with_names(self) -> list[tuple[Optimizer, GroupNames]]:
        """Return each optimizer with the names in each of its groups."""
        return list(zip(self._optimizers(), self.names, strict=True))

    def narrow_steps(self) -> None:
        """Narrow steps to this rank's parameters, even if the step's closure splits the module.

        Raises:
            ValueError: An optimizer's step may depend on other parameters, or cannot run on the
                host although it should.
        """
        if self._group.world_size == 1 and not self._on_host and self._masters is None:
            return
        num_ranks, num_optimizer_shards = self._group.num_ranks, self._num_sharing
        for optimizer in self._optimizers() if num_ranks * num_optimizer_shards > 1 else ():
            refuse_optimizer(optimizer, num_ranks, num_optimizer_shards, self._is_declared)
        for optimizer in self._optimizers() if self._group.num_tensor_ranks > 1 else ():
            refuse_non_elementwise(optimizer)
        changes = self._pipeline.gradient_changes
        self._narrowed = [narrow_steps(optimizer, changes) for optimizer in self._optimizers()]
        for narrowed in self._narrowed:
            narrowed.use_stand_ins(self._make_stand_ins(narrowed.optimizer))

    def _make_stand_ins(self, optimizer: Optimizer) -> StandInStep | None:
        if not self._on_host and self._masters is None:
            return None
        refuse_stand_ins(optimizer, self._on_host)
        members = [p for group in optimizer.param_groups for p in group["params"]]
        if self._masters is not None and members and not any(map(is_half, members)):
            raise ValueError(
                f'master_weights="float32" is for parameters in bfloat16 or float16, and those of '
                f"{type(optimizer).__name__} are in {members[0].dtype}; leave it out, or use "
                f'Trainer(precision="bf16-true")'
            )
        by_bucket = may_step_by_bucket(optimizer)
        if not self._on_host:
            return MasterStep(optimizer, by_bucket, self._masters)
        return HostStep(optimizer, self._pipeline.device, by_bucket, self._masters)

    def loading_stand_in_state(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Return the context in which an optimizer loads state to the place of its step."""
        if not self._on_host and self._masters is None:
            return nullcontext()
        return loading_stand_in_state(optimizer, self._masters, self._on_host)

    def move_hooks_to_end(self) -> None:
        """Register the step's hooks again, to run after hooks that were registered since."""
        for narrowed in self._narrowed:
            narrowed.move_hook_to_end()

    def drop_remote_parameters(self) -> None:
        """Drop the parameters of other ranks; called once, before the first training step."""
        names = self.names
        self._send_moved_states()
        self._pipeline.commit()
        set_group_parameters(self._optimizers(), self._pipeline.module, names)
        self._refuse_lost_states()
        self.drop_remote_states()

    def make_early_step(self) -> EarlyStep:
        """Return the object that steps parameters as their gradients become final."""
        tensors = self._pipeline.tensors
        later = {id(tensor) for _, tensor, _ in tensors.shared_parameters()}
        pairs = tensors.parameters_with_local_stages().values()
        later |= {id(p) for p, _ in pairs if has_partial_gradient(p)}
        alone = {p: min(s) for p, s in pairs if len(s) == 1 and id(p) not in later}
        steps = [n.stand_ins for n in self._narrowed if isinstance(n.stand_ins, HostStep)]

        def submit(parameter: Tensor) -> None:
            for step in steps:
                step.submit(parameter)

        return EarlyStep(alone, submit)

    def host_step_seconds(self) -> float:
        """Return the seconds of this rank's steps on the host; 0 if they run on the device."""
        return sum(n.stand_ins.seconds for n in self._narrowed if n.stand_ins is not None)

    def updating_replica(self, parameter: Tensor) -> int:
        """Return the replica that updates a parameter: this one, unless they divide updates."""
        return (
            self._group.replica
            if self._shares is None
            else self._shares.updating_replica(parameter)
        )

    def is_updated_by_other_replica(self, parameter: Tensor) -> bool:
        """Return whether another replica updates a parameter of this rank."""
        return self.updating_replica(parameter) != self._group.replica

    def _add_moved_parameters(self) -> None:
        """Add to the groups the parameters that the first batch has moved to this rank."""
        for narrowed in self._narrowed:
            narrowed.replace_shapes()

    def _send_moved_states(self) -> None:
        """Send the states of parameters that have moved to other ranks."""
        parts = self._pipeline.parts
        for name, source in parts.moved.items() if parts is not None else ():
            parameter = self._pipeline.module.get_parameter(name)
            for optimizer in self._optimizers():
                state = optimizer.state.get(parameter)
                state = self._group.broadcast(state, self._group.global_ranks[source])
                if state and not isinstance(parameter, RemoteTensor):
                    optimizer.state[parameter] = state

    def reserve_host(self, host: HostMemory, takes_snapshots: bool) -> None:
        """Reserve host memory for the optimizers that step there; called before they allocate.

        Args:
            host: The host memory of this rank.
            takes_snapshots: Whether snapshots are taken.

        Raises:
            HostMemoryError: The host has too little memory.
        """
        if not self._on_host:
            return
        optimizers = self._optimizers()
        states = estimate_state_bytes(optimizers, self._masters is not None)
        parameters = self._pipeline.tensors.canonical_parameters().values()
        members = [
            p for p in parameters if id(p) in states and not self.is_updated_by_other_replica(p)
        ]
        kept = sum(states[id(p)] for p in members)
        pairs = [p.nbytes + gradient_bytes(p) for p in members if p.requires_grad]
        staging = staging_bytes(pairs, all(map(may_step_by_bucket, optimizers)))
        sizes = {
            "state and masters" if self._masters is not None else "state": kept,
            "their snapshot": kept if takes_snapshots else 0,
            "staging buffers": staging,
        }
        parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in sizes.items() if size)
        entries = [*(state for optimizer in optimizers for state in optimizer.state.values())]
        present = sum(t.nbytes for t in tensors_in(entries) if t.device.type == "cpu")
        host.subtract_optimizer_bytes(sum(sizes.values()), present, parts)

    def drop_remote_states(self) -> None:
        """Drop the optimizer state of parameters of other ranks and replicas."""
        local_ids = {id(p) for p in self._pipeline.tensors.canonical_parameters().values()}
        for optimizer in self._optimizers():
            forget_states(optimizer, lambda p: id(p) not in local_ids)
        if self._pipeline.committed:
            self._assign_to_replicas()
            if self._masters is not None:
                parameters = self._pipeline.tensors.canonical_parameters().items()
                self._masters.make_loaded_masters(
                    {n: p for n, p in parameters if not self.is_updated_by_other_replica(p)}
                )

    def _assign_to_replicas(self) -> None:
        """Assign all parameters of this rank to replicas, those that optimizers have first."""
        tensors = self._pipeline.tensors
        new = None
        if self._num_sharing > 1:
            new = OptimizerPartition(self._group, self._replicas_of_tied())
        for narrowed in self._narrowed:
            narrowed.partition_step(new if narrowed.optimizer.param_groups else None)
        before = (n.shares for n in self._narrowed if n.shares is not None)
        self._shares = next(before, new)  # of an optimizer that has its state from another fit
        if self._shares is not None:
            self._shares.assign(tensors.canonical_parameters().values())

    def _replicas_of_tied(self) -> dict[Tensor, int]:
        """Assign the parameters that several ranks have to replicas in turn, alike on all ranks."""
        tensors = self._pipeline.tensors
        places = {name: place for place, name in enumerate(tensors.names_on_several_ranks())}
        parameters = tensors.canonical_parameters().items()
        return {p: places[name] % self._num_sharing for name, p in parameters if name in places}

    def partition_of(self, optimizer: Optimizer) -> OptimizerPartition | None:
        """Return the parameters that each replica steps; None if each replica steps all."""
        shares = [n.shares for n in self._narrowed if n.optimizer is optimizer]
        return shares[0] if shares else None

    def _refuse_lost_states(self) -> None:
        """Refuse an optimizer of an earlier fit with states that are on another rank.

        Raises:
            RuntimeError: This rank trains a parameter that another rank trained before.
        """
        parameters = self._pipeline.tensors.canonical_parameters()
        names = {id(parameter): name for name, parameter in parameters.items()}
        parameters_without_state = [
            p for narrowed in self._narrowed for p in narrowed.parameters_without_state
        ]
        lost = [names[id(p)] for p in parameters_without_state if id(p) in names]
        lost_anywhere = [name for names in self._group.gather(lost) for name in names]
        if lost_anywhere:
            raise RuntimeError(
                f"{lost_anywhere[0]} was trained on another rank before, which has its optimizer "
                f"state: let configure_optimizers make a new optimizer for this fit, resume from a "
                f"checkpoint, or use the same settings to cut the module"
            )
