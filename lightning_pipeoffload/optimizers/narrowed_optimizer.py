"""An optimizer whose groups have the whole module's parameters, and whose step has this rank's.

Hooks, schedulers and callbacks see the groups that one device's optimizer would have. During its
computation, and while gradients are set to zero, the groups are narrowed to what this rank owns.
Inside the closure, in which hooks run, they are whole again::

    optimizer.step(closure)   groups:  this rank's   | in the closure: all |   this rank's
    hooks, schedulers         groups:  all

With ``optimizer_offload=True`` or masters other tensors take the place of this rank's parameters
there; see :class:`~lightning_pipeoffload.optimizers.stand_in_step.StandInStep`.

With ``sharding="optimizer"`` the replicas of a rank divide its step: each parameter is stepped by
one replica, its owner, the largest first by the replica that has least. The owner has the mean of
its gradient and its state, and sends the weight to the others::

    gradients                  [ embed ][ layer 0 ][ layer 1 ][ head ]   of every replica's batch
    mean, step of replica 0    [ embed ]           [ layer 1 ]           and optimizer state
    mean, step of replica 1             [ layer 0 ]           [ head ]   and optimizer state
    weights                    [ embed ][ layer 0 ][ layer 1 ][ head ]   on every replica
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeoffload.optimizers.stand_in_step import StandInStep
from lightning_pipeoffload.runtime import NOTHING
from lightning_pipeoffload.runtime.comm import (
    FlatBucket,
    PipelineGroup,
    Replicas,
    assign_owners,
    bucket_keys,
)
from lightning_pipeoffload.runtime.device import profiler_range
from lightning_pipeoffload.runtime.shapes import GradientChanges, RemoteTensor, ShapeOnly

_NONE: Mapping[Tensor, int] = MappingProxyType({})


class OptimizerPartition:
    """Assigns each parameter to the replica that steps it.

    Args:
        group: This process's groups; its counterparts are in other replicas.
        tied: The replicas of parameters that other ranks have too, whose gradients these add up.
    """

    def __init__(self, group: PipelineGroup, tied: Mapping[Tensor, int] = _NONE) -> None:
        self._group = group
        self._owners: dict[Tensor, int] = {**tied}
        self._loads = [0] * group.num_replicas
        for parameter, owner in tied.items():
            self._loads[owner] += parameter.nbytes
        self._stepping: dict[Tensor, None] = {}

    @property
    def num_replicas(self) -> int:
        """The number of replicas that divide the step."""
        return len(self._loads)

    def assign(self, parameters: Iterable[Tensor]) -> None:
        """Assign new parameters to replicas; all replicas have them in one order."""
        new = [p for p in parameters if p not in self._owners]
        for trains in (True, False):
            members = [p for p in new if p.requires_grad == trains]
            owners = assign_owners([p.nbytes for p in members], self._loads)
            self._owners.update(zip(members, owners, strict=True))

    def updating_replica(self, parameter: Tensor) -> int:
        """Return the replica that steps a parameter, and has its gradient and state."""
        return self._owners.get(parameter, self._group.replica)

    def is_own(self, parameter: Tensor) -> bool:
        """Whether that is this replica."""
        return self._owners.get(parameter) == self._group.replica

    def start_step(self) -> None:
        """Forget the parameters of the last step, which may have ended in an error."""
        self._stepping.clear()

    def parameters_to_step(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return those of a group's parameters that this replica steps now."""
        self.assign(parameters)
        # Others are not changed, and need not be sent.
        stepping = [p for p in parameters if p.requires_grad or p.grad is not None]
        self._stepping.update(dict.fromkeys(stepping))
        return [p for p in stepping if self.is_own(p)]

    def start_broadcasts(self) -> None:
        """Start to send each replica's parameters to all; all replicas call it.

        They are pending parameters then; see :class:`PendingParameters`.
        """
        replicas = self._group.replicas
        copies = [
            _Copy(replicas, replica, values)
            for replica in range(self.num_replicas)
            for values in self._values_by_bucket(replica)
        ]

        def end() -> None:
            for copy in copies:
                copy.end()

        replicas.pending.defer_or_wait(end, self._stepping)

    def _values_by_bucket(self, replica: int) -> Iterable[list[Tensor]]:
        values = [p.detach() for p in self._stepping if self._owners[p] == replica and p.numel()]
        buckets = bucket_keys(dict(enumerate(values)))
        return ([values[number] for number in bucket] for bucket in buckets)


class _Copy:
    """Values on their way from one replica to all.

    Args:
        replicas: The replicas.
        source: The replica that has them.
        values: The tensors, on each replica.
    """

    def __init__(self, replicas: Replicas, source: int, values: list[Tensor]) -> None:
        self._is_received = source != replicas.replica
        self._bundle = FlatBucket(values)
        self._wait = replicas.start_broadcast(self._bundle.flat, source)

    def end(self) -> None:
        """Wait for the values, and copy them into the parameters."""
        self._wait()
        if self._is_received:
            self._bundle.unpack()


def narrow_steps(optimizer: Optimizer, changes: GradientChanges) -> NarrowedOptimizer:
    """Narrow an optimizer's steps to what this rank owns; a second call changes nothing.

    Args:
        optimizer: The optimizer of the whole module's parameters.
        changes: Counts the changes of gradients of parameters that other ranks own.
    """
    # Private: a user may give every fit the same optimizer.
    for hook in optimizer._optimizer_step_pre_hooks.values():
        if is_narrowing_hook(hook):
            narrowed: NarrowedOptimizer = hook.__self__  # type: ignore[attr-defined]
            narrowed.changes = changes
            narrowed.replace_shapes()
            return narrowed
    return NarrowedOptimizer(optimizer, changes)


def is_narrowing_hook(hook: Callable[..., Any]) -> bool:
    """Whether a hook on a step is one of those that narrow it."""
    return isinstance(getattr(hook, "__self__", None), NarrowedOptimizer)


class NarrowedOptimizer:
    """Narrows an optimizer's groups around its step.

    Args:
        optimizer: The optimizer of the whole module's parameters, those of other ranks as shapes.
        changes: Counts the changes of those parameters' gradients.

    Attributes:
        optimizer: That optimizer.
        changes: Counts the changes of those parameters' gradients.
        shares: The parameters of each replica; None: all replicas step all.
        stand_ins: Steps other tensors in place of parameters; None: it steps these.
    """

    def __init__(self, optimizer: Optimizer, changes: GradientChanges) -> None:
        self.optimizer = optimizer
        self.changes = changes
        self.shares: OptimizerPartition | None = None
        self.stand_ins: StandInStep | None = None
        self._replaced: list[Tensor] = []
        self._looked_at: tuple[int, ...] = ()
        self._zero_own = optimizer.zero_grad
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]
        self._whole: list[tuple[dict[str, Any], list[Any]]] = []
        self._update: AbstractContextManager[Any] = NOTHING  # what a profiler shows of it
        ended = optimizer.register_step_post_hook(self._end_step)
        # Private: before the user's hooks after a step, so that they see whole groups.
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(ended.id, last=False)
        self._pre_hook = optimizer.register_step_pre_hook(self._start_step)

    def replace_shapes(self) -> None:
        """Replace RemoteTensors in the groups by the parameters now in their place."""
        self._restore_groups()  # after a step that has ended in an error
        members = [group["params"] for group in self.optimizer.param_groups]
        looked_at = RemoteTensor.num_became, *map(len, members)
        if looked_at == self._looked_at:
            return
        self._looked_at = looked_at
        shapes = [p for of_group in members for p in of_group if isinstance(p, RemoteTensor)]
        real = {id(p): p.became for p in shapes if p.became is not None}
        self._replaced += real.values()
        if real:
            for group in self.optimizer.param_groups:
                group["params"] = [real.get(id(p), p) for p in group["params"]]

    def use_stand_ins(self, stand_ins: StandInStep | None) -> None:
        """Step other tensors in place of parameters; None: the parameters."""
        self.stand_ins = stand_ins

    def partition_step(self, shares: OptimizerPartition | None) -> None:
        """Divide the step among replicas, and drop the state of the others' parameters.

        Args:
            shares: The parameters of each replica; None: all replicas step all.

        Raises:
            RuntimeError: A fit before this one has divided the optimizer's state in another way.
        """
        has_state = bool(self.optimizer.state)
        if has_state and self.shares is not None:
            self._refuse_other(shares)
            return
        self.shares = shares
        if shares is not None:
            shares.assign(p for group in self.optimizer.param_groups for p in own_members(group))
            forget_states(self.optimizer, lambda p: not shares.is_own(p))

    def _refuse_other(self, shares: OptimizerPartition | None) -> None:
        assert self.shares is not None
        now = 1 if shares is None else shares.num_replicas
        if now != self.shares.num_replicas:
            raise RuntimeError(
                f"what {type(self.optimizer).__name__} keeps is shared out over "
                f"{self.shares.num_replicas} replicas since the fit before, and this one shares it "
                f"out over {now}: let configure_optimizers make a new optimizer for this fit, and "
                f"resume from a checkpoint to keep what it knows"
            )

    @property
    def parameters_without_state(self) -> list[Tensor]:
        """Parameters that came from another rank, on which their state has stayed."""
        state = self.optimizer.state
        return [p for p in self._replaced if state and p not in state and p.requires_grad]

    def move_hook_to_end(self) -> None:
        """Run after the user's hooks before a step, so that they see whole groups."""
        self._pre_hook.remove()
        self._pre_hook = self.optimizer.register_step_pre_hook(self._start_step)

    def _start_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        step, *arguments = args
        closures = [value for value in (*arguments, *kwargs.values()) if callable(value)]
        is_narrow = bool(self._whole) if not closures else any(map(_narrows_again, closures))
        if is_narrow:  # in a subclass's step that calls its base's, which has hooks as well
            return None
        if self.shares is not None:
            self.shares.start_step()
        self._narrow_groups(self.shares)
        if not closures:
            self._start_update()
        return (
            (step, *map(self._with_whole_groups, arguments)),
            {name: self._with_whole_groups(value) for name, value in kwargs.items()},
        )

    def _start_update(self) -> None:
        """Begin with what follows the closure, in which the whole batch has run."""
        self._update = profiler_range("optimizer")
        self._update.__enter__()
        if self.stand_ins is not None:
            self.stand_ins.step_all_but_last_bucket()

    def _end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.stand_ins is not None:
            self.stand_ins.write_back_parameters()
        self._restore_groups()
        if self.shares is not None:
            self.shares.start_broadcasts()

    def _zero_grad(self, set_to_none: bool = True) -> None:
        self._narrow_groups(None)
        self._zero_own(set_to_none)
        self._restore_groups()
        self.changes.record(are_none=set_to_none)

    def _narrow_groups(self, shares: OptimizerPartition | None) -> None:
        self.replace_shapes()  # the module may be whole again, on one device
        for group in self.optimizer.param_groups:
            self._whole.append((group, group["params"]))
            members = own_members(group)
            group["params"] = members if shares is None else shares.parameters_to_step(members)

    def _restore_groups(self) -> None:
        if self.stand_ins is not None:
            self.stand_ins.restore()
        for group, members in self._whole:
            group["params"] = members
        self._whole.clear()
        self._update.__exit__(None, None, None)
        self._update = NOTHING

    def _with_whole_groups(self, closure: Any) -> Any:
        return self._wrap_closure(closure) if callable(closure) else closure

    def _wrap_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            if self.stand_ins is not None:  # the optimizer may call its closure again
                self.stand_ins.write_back_parameters()
            self._restore_groups()
            if self.stand_ins is not None:
                self.stand_ins.begin()
            result = closure()
            self._narrow_groups(self.shares)
            self._start_update()
            return result

        call.narrows_again = True  # type: ignore[attr-defined]
        return call


def _narrows_again(closure: Any) -> bool:
    return getattr(closure, "narrows_again", False)


def own_members(group: dict[str, Any]) -> list[Tensor]:
    """Return the parameters of an optimizer's group that are this rank's."""
    return [p for p in group["params"] if not isinstance(p, ShapeOnly)]


def forget_states(optimizer: Optimizer, is_forgotten: Callable[[Tensor], bool]) -> None:
    """Drop an optimizer's state of some parameters."""
    for parameter in [p for p in optimizer.state if is_forgotten(p)]:
        del optimizer.state[parameter]
