"""A table of optimizers that may step a subset of the parameters, and the bytes of their state.

A rank's optimizer has this rank's parameters only. It gives the same result as on one device if the
new value and state of a parameter depend only on its own value, gradient and state and the options
of its group: not on other parameters, random numbers for several parameters, communication, or a
closure's loss. Optimizers are identified by their ``step`` function; the table has those that tests
run, and the user declares any other with ``per_parameter_optimizer=True``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeoffload.optimizers.master_weights import is_half
from lightning_pipeoffload.optimizers.narrowed_optimizer import is_narrowing_hook

Group = Mapping[str, Any]
StateBytes = Callable[[Any, Group, Tensor], float]


class OptimizerTraits(NamedTuple):
    """The properties of an optimizer whose steps are per parameter.

    Attributes:
        state_bytes: Returns the bytes of state, without scalars, for optimizer, group and
            parameter.
        of_device: Whether its kernels do not exist for the host.
        obstacle: Returns why an optimizer's options make its steps depend on other parameters; ""
            if they do not.
        by_element: Whether the step of an element depends on no other element of its parameter.
    """

    state_bytes: StateBytes
    of_device: bool = False
    obstacle: Callable[[Any], str] = lambda optimizer: ""
    by_element: bool = True


def _copies(count: float | Callable[[Group], float]) -> StateBytes:
    """State of ``count`` tensors of the parameter's shape and dtype; may depend on options."""
    number = count if callable(count) else lambda group: count
    return lambda optimizer, group, p: number(group) * p.nbytes


def _rows_and_columns(p: Tensor) -> float:
    """Return the number of elements of the row and column means; of a vector, its length."""
    if p.dim() < 2:
        return p.numel()
    return p.numel() / p.shape[-1] + p.numel() / p.shape[-2]


def _factorized(copies: Callable[[Group], float]) -> StateBytes:
    def count(optimizer: Any, group: Group, p: Tensor) -> float:
        return copies(group) * p.nbytes + _rows_and_columns(p) * p.element_size()

    return count


def _blocks_of_bitsandbytes(optimizer: Any, group: Group, p: Tensor) -> float:
    number = 2 if any("Optimizer2State" in kind.__name__ for kind in type(optimizer).__mro__) else 1
    if optimizer.args.optim_bits == 32 or p.numel() < optimizer.args.min_8bit_size:
        return number * 4 * p.numel()
    return number * (p.numel() + 4 * p.numel() / 256)


def _momentum(group: Group) -> float:
    return bool(group.get("momentum"))


def _overrides(optimizer: Any) -> str:
    manager = optimizer.mng
    if manager.uses_config_override or manager.module_weight_config_triple:
        return "GlobalOptimManager overrides options by a parameter's place in its group"
    return ""


_ADAM = OptimizerTraits(_copies(lambda group: 2 + bool(group.get("amsgrad"))))
_TWO, _ONE = OptimizerTraits(_copies(2)), OptimizerTraits(_copies(1))

TABLE: dict[str, OptimizerTraits] = {
    "torch.optim._adafactor.Adafactor": OptimizerTraits(
        _factorized(lambda group: 0), by_element=False
    ),
    "torch.optim._muon.Muon": OptimizerTraits(_copies(1), by_element=False),
    "torch.optim.adadelta.Adadelta": _TWO,
    "torch.optim.adagrad.Adagrad": _ONE,
    "torch.optim.adam.Adam": _ADAM,  # and AdamW
    "torch.optim.adamax.Adamax": _TWO,
    "torch.optim.asgd.ASGD": _ONE,
    "torch.optim.nadam.NAdam": _TWO,
    "torch.optim.radam.RAdam": _TWO,
    "torch.optim.rmsprop.RMSprop": OptimizerTraits(
        _copies(lambda group: 1 + _momentum(group) + bool(group.get("centered")))
    ),
    "torch.optim.rprop.Rprop": _TWO,
    "torch.optim.sgd.SGD": OptimizerTraits(_copies(_momentum)),
    "torch.optim.sparse_adam.SparseAdam": _TWO,
    "transformers.optimization.Adafactor": OptimizerTraits(
        _factorized(lambda group: group.get("beta1") is not None), by_element=False
    ),
    "bitsandbytes.optim.optimizer.Optimizer8bit": OptimizerTraits(
        _blocks_of_bitsandbytes, of_device=True, obstacle=_overrides, by_element=False
    ),
}
"""Classes whose ``step`` is per parameter, by module and name."""

# Names of classes whose step depends on all parameters, whatever the user declares.
_OVER_ALL = {
    "AdaLomo",
    "Adai",
    "AdamMini",
    "Adam_mini",
    "DAdaptAdaGrad",
    "DAdaptAdam",
    "DAdaptLion",
    "DAdaptSGD",
    "GSAM",
    "LBFGS",
    "Lomo",
    "Prodigy",
    "SAM",
}
_UNKNOWN = OptimizerTraits(_copies(2))  # counted as Adam


def refuse_optimizer(
    optimizer: Any, num_ranks: int, num_optimizer_shards: int = 1, is_declared: bool = False
) -> None:
    """Refuse an optimizer whose step of one parameter may depend on other parameters.

    Args:
        optimizer: The user's optimizer.
        num_ranks: The number of ranks over which its parameters are spread.
        num_optimizer_shards: The number of replicas that divide its step.
        is_declared: The user's ``per_parameter_optimizer``.

    Raises:
        ValueError: The message has its class, the reason, and what to do.
    """
    if not optimizer.param_groups:  # Lightning's, where the user has none
        return
    name = type(optimizer).__name__
    whose = f"{num_ranks} ranks" if num_ranks > 1 else f"{num_optimizer_shards} replicas"
    option = "devices=1" if num_ranks > 1 else 'sharding="none"'
    instead = f"use an optimizer that treats each parameter by itself, such as AdamW, or {option}"
    if num_optimizer_shards > 1 and hasattr(optimizer, "eval"):
        raise ValueError(
            f"{name} computes evaluation weights from its whole state, and each of the "
            f'{num_optimizer_shards} replicas has only a part of it; set sharding="none", or use '
            f"another "
            f"optimizer"
        )
    if any(kind.__name__ in _OVER_ALL for kind in type(optimizer).__mro__):
        raise ValueError(
            f"{name} computes over all its parameters, and each of the {whose} has a part of them "
            f"only; {instead}"
        )
    row = TABLE.get(_step_of(optimizer))
    obstacle = "" if row is None else row.obstacle(optimizer)
    if obstacle:
        raise ValueError(
            f"{name} computes over all its parameters ({obstacle}), and each of the {whose} has a "
            f"part of them only; leave that out, or {instead}"
        )
    if (row is None or (reason := _why_step_differs(optimizer))) and not is_declared:
        because = reason if row is not None else "it is not among those that are known"
        raise ValueError(
            f"{name} may compute over all its parameters ({because}), and each of the {whose} has "
            f"only a part of them; if its step of a parameter depends only on that parameter's "
            f"value, gradient and state and the options of its group, set "
            f"PipeOffloadStrategy(per_parameter_optimizer=True); else {instead}"
        )


def refuse_non_elementwise(optimizer: Any) -> None:
    """Raise ``ValueError`` for an optimizer whose step needs more of a parameter than a shard."""
    row = TABLE.get(_step_of(optimizer))
    if optimizer.param_groups and (
        row is None or not row.by_element or _why_step_differs(optimizer)
    ):
        raise ValueError(
            f"{type(optimizer).__name__} is not known to step each element of a parameter by "
            f"itself, and with tensor_parallel_size above 1 a rank has a shard of it; use "
            f"torch.optim.AdamW, or tensor_parallel_size=1"
        )


def refuse_stand_ins(optimizer: Any, on_host: bool) -> None:
    """Refuse an optimizer that cannot step other tensors in place of its parameters.

    Args:
        optimizer: The user's optimizer.
        on_host: Whether these are on the host; else they are masters on the device.

    Raises:
        ValueError: The message has its class, the reason, and what to do.
    """
    row, reason = TABLE.get(_step_of(optimizer)), ""
    if any(kind.__name__ in _OVER_ALL for kind in type(optimizer).__mro__):
        reason = "keeps more of its parameters than state by parameter"
    elif row is not None and row.of_device:
        reason = "steps by kernels of the device" if on_host else "keeps 8-bit state by group"
    elif hasattr(optimizer, "eval"):
        reason = "makes weights for evaluation of the device's and of its state"
    elif on_host and any(group.get("capturable") for group in optimizer.param_groups):
        reason = "counts its steps on the device with capturable=True"
    if reason and not on_host:
        raise ValueError(
            f'master_weights="float32" steps float32 copies of the parameters, and '
            f"{type(optimizer).__name__} {reason}; use torch.optim.AdamW, or leave master_weights "
            f"out"
        )
    if reason:
        raise ValueError(
            f"optimizer_offload=True steps on the host, and {type(optimizer).__name__} {reason}; "
            f"use torch.optim.AdamW, whose fused=True has kernels of the host, or "
            f"optimizer_offload=False"
        )


def may_step_by_bucket(optimizer: Any) -> bool:
    """Return whether steps of subsets of the parameters are known to equal one step of all."""
    return _step_of(optimizer) in TABLE and not _step_override(optimizer)


def _step_of(optimizer: Any) -> str:
    """Return the module and name of the class that defines an optimizer's ``step``."""
    step = inspect.unwrap(type(optimizer).step)
    return f"{step.__module__}.{step.__qualname__.rpartition('.')[0]}"


def _why_step_differs(optimizer: Any) -> str:
    """Return why an optimizer's step may differ from that of its class; "" if it does not."""
    if reason := _step_override(optimizer):
        return reason
    # Private: the only lists of the hooks, which may use any parameter.
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        for hook in getattr(optimizer, hooks, {}).values():
            if not is_narrowing_hook(hook):  # of a fit before this one
                return f"its step has a hook, {getattr(hook, '__qualname__', type(hook).__name__)}"
    return ""


def _step_override(optimizer: Any) -> str:
    """Return what of an optimizer's step is not that of its class; "" if all is."""
    step = vars(optimizer).get("step")  # a scheduler's, which only counts, names what it wraps
    if step is not None and inspect.unwrap(step) is not inspect.unwrap(type(optimizer).step):
        return "its step has been replaced"
    changed = _overridden_helper(type(optimizer))
    if changed:
        return f"its step is {_step_of(optimizer)}'s, and it has its own {changed}"
    return ""


def _overridden_helper(kind: type) -> str:
    """Return a method that the step may call and that another library overrides; "" if none."""
    step = inspect.unwrap(kind.step)  # type: ignore[attr-defined]
    classes = inspect.getmro(kind)
    owner = next(c for c in reversed(classes) if inspect.unwrap(vars(c).get("step", c)) is step)
    helpers = {name for name, value in vars(owner).items() if inspect.isfunction(value)}
    helpers = {name for name in helpers if name != "step" and not name.startswith("__")}
    library = owner.__module__.partition(".")[0]
    for subclass in classes[: classes.index(owner)]:
        if subclass.__module__.partition(".")[0] != library:
            for name in helpers & vars(subclass).keys():
                return name
    return ""


def estimate_state_bytes(
    optimizers: Iterable[Optimizer], has_masters: bool = False
) -> dict[int, int]:
    """Return the bytes of optimizer state of each parameter, by its id.

    Scalars, such as the step count, are not included. An optimizer that is not in the table counts
    as Adam.

    Args:
        optimizers: The optimizers.
        has_masters: Whether they step masters of half-precision parameters; these are included.
    """
    sizes: dict[int, int] = {}
    for optimizer in optimizers:
        row = TABLE.get(_step_of(optimizer), _UNKNOWN)
        for group in optimizer.param_groups:
            for p in group["params"]:
                size: float = 0
                if p.requires_grad and has_masters and is_half(p):
                    master = torch.empty(p.shape, dtype=torch.float32, device="meta")
                    size = master.nbytes + row.state_bytes(optimizer, group, master)
                elif p.requires_grad:
                    size = row.state_bytes(optimizer, group, p)
                sizes[id(p)] = math.ceil(size)
    return sizes
