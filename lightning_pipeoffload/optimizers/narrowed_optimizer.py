"""An optimizer whose groups have the whole module's parameters, and whose step has this rank's.

Hooks, schedulers and callbacks see the groups that one device's optimizer would have. While it
computes, or sets gradients to zero, they are narrowed to what this rank owns, and a step that is
shared out over replicas to what this one steps with; the closure, in which hooks run, sees all
again::

    optimizer.step(closure)   groups:  this rank's   | in the closure: all |   this rank's
    hooks, schedulers         groups:  all
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeoffload.optimizers.optimizer_state import forget_states
from lightning_pipeoffload.optimizers.step_shares import StepShares
from lightning_pipeoffload.runtime.shapes.remote_tensor import GradientAge, RemoteTensor
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly


def narrow_steps(optimizer: Optimizer, age: GradientAge) -> NarrowedOptimizer:
    """Let an optimizer step with what this rank owns, from its first step on; again is harmless.

    Args:
        optimizer: The optimizer of the whole module's parameters.
        age: The age of the gradients of parameters that other ranks own.
    """
    # Private: a user may give every fit the same optimizer.
    for hook in optimizer._optimizer_step_pre_hooks.values():
        if narrows(hook):
            found: NarrowedOptimizer = hook.__self__  # type: ignore[attr-defined]
            found.age = age
            found.adopt()
            return found
    return NarrowedOptimizer(optimizer, age)


def narrows(hook: Callable[..., Any]) -> bool:
    """Whether a hook on a step is one of those that narrow it."""
    return isinstance(getattr(hook, "__self__", None), NarrowedOptimizer)


class NarrowedOptimizer:
    """Narrows an optimizer's groups around its step.

    Args:
        optimizer: The optimizer of the whole module's parameters, those of other ranks as shapes.
        age: The age of those parameters' gradients.

    Attributes:
        optimizer: That optimizer.
        age: The age of those parameters' gradients.
        shares: What each replica steps with; None: all step with everything.
    """

    def __init__(self, optimizer: Optimizer, age: GradientAge) -> None:
        self.optimizer = optimizer
        self.age = age
        self.shares: StepShares | None = None
        self._adopted: list[Tensor] = []
        self._zero_own = optimizer.zero_grad
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]
        self._whole: list[tuple[dict[str, Any], list[Any]]] = []
        optimizer.register_step_post_hook(self._end_step)
        self._pre_hook = optimizer.register_step_pre_hook(self._start_step)

    def adopt(self) -> None:
        """Put into the groups what has taken the shapes' places in a module made whole since."""
        self._widen()  # where a step has ended in an error
        for group in self.optimizer.param_groups:
            group["params"] = [self._real(p) for p in group["params"]]

    def _real(self, parameter: Tensor) -> Tensor:
        real = parameter.became if isinstance(parameter, RemoteTensor) else None
        if real is None:
            return parameter
        self._adopted.append(real)
        return real

    def share_out(self, shares: StepShares | None) -> None:
        """Share out the step, and keep of the state what is this replica's.

        Args:
            shares: What each replica steps with; None: all step with everything.

        Raises:
            RuntimeError: The optimizer's state is shared out in another way, by a fit before.
        """
        has_state = bool(self.optimizer.state)
        if has_state and self.shares is not None:
            self._refuse_other(shares)
            return
        self.shares = shares
        if shares is not None:
            shares.take_on(p for group in self.optimizer.param_groups for p in own_members(group))
            forget_states(self.optimizer, lambda p: not shares.is_own(p))

    def _refuse_other(self, shares: StepShares | None) -> None:
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
    def stateless(self) -> list[Tensor]:
        """Parameters that came from a rank whose optimizer stepped, and left their state there."""
        state = self.optimizer.state
        return [p for p in self._adopted if state and p not in state and p.requires_grad]

    def come_last(self) -> None:
        """Let the user's hooks before a step, which were registered since, see all."""
        self._pre_hook.remove()
        self._pre_hook = self.optimizer.register_step_pre_hook(self._start_step)

    def _start_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        step, *given = args
        if self.shares is not None:
            self.shares.start_step()
        self._narrow(self.shares)
        return (
            (step, *map(self._among_whole, given)),
            {name: self._among_whole(value) for name, value in kwargs.items()},
        )

    def _end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._widen()
        if self.shares is not None:
            self.shares.gather()

    def _zero_grad(self, set_to_none: bool = True) -> None:
        self._narrow(None)
        self._zero_own(set_to_none)
        self._widen()
        self.age.change(are_none=set_to_none)

    def _narrow(self, shares: StepShares | None) -> None:
        self.adopt()  # a module that has left its pipeline may train on one device
        for group in self.optimizer.param_groups:
            self._whole.append((group, group["params"]))
            own = own_members(group)
            group["params"] = own if shares is None else shares.own_of(own)

    def _widen(self) -> None:
        for group, members in self._whole:
            group["params"] = members
        self._whole.clear()

    def _among_whole(self, closure: Any) -> Any:
        return self._calling(closure) if callable(closure) else closure

    def _calling(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            self._widen()
            result = closure()
            self._narrow(self.shares)
            return result

        return call


def own_members(group: dict[str, Any]) -> list[Tensor]:
    """Return the parameters of an optimizer's group that are this rank's."""
    return [p for p in group["params"] if not isinstance(p, ShapeOnly)]
