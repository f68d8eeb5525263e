"""Hooks of a module and of callbacks that the user has written, and what runs around them.

Those of Lightning and of this package do on every rank what they do on one. A user's hook may read
gradients, so the ranks exchange their sizes first; and what it logs at an epoch's end is published
by the root after each hook.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_forward_hooks,  # private: hooks of all modules' forwards
    _global_forward_pre_hooks,
)

from lightning_pipeoffload.lightning_names import PACKAGES
from lightning_pipeoffload.runtime.comm import reporting_lost_peers
from lightning_pipeoffload.runtime.run import Pipeline
from lightning_pipeoffload.runtime.shapes import KnownNorms, RemoteGradient, RemoteTensor
from lightning_pipeoffload.runtime.users_code import WrappedHook
from lightning_pipeoffload.runtime.weight_grad import has_hooks

# The demos of this package count as the user's code.
_KNOWN = (*(f"{name}." for name in PACKAGES), "lightning_pipeoffload.callbacks.")
_BETWEEN_BATCHES = (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_train_batch_end",
)
BEFORE_STEPS = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    *(f"on_{kind}_batch_start" for kind in ("train", "validation", "test", "predict")),
)
OF_GRADIENTS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
_KINDS = ("train", "validation", "test", "predict")
_EPOCH_END = (
    *(f"on_{kind}_epoch_end" for kind in _KINDS),
    *(f"on_{kind}_end" for kind in (*_KINDS, "fit")),
)
# Each with a message of its own, which all ranks receive.
_BATCH_END = tuple(f"on_{kind}_batch_end" for kind in _KINDS)
_ABSENT, _THERE, _MEASURED = range(3)


def owners_of_hooks(trainer: Trainer) -> list[Any]:
    """Return the module and, after it, the callbacks."""
    return [trainer.lightning_module, *trainer.callbacks]  # type: ignore[attr-defined] # set at run time


def is_users_hook(owner: object, hook: str) -> bool:
    """Whether the user has written a hook of ``owner``, in its class or on the instance."""
    return not getattr(getattr(owner, hook), "__module__", "").startswith(_KNOWN)


def _hooks_of(owner: object, hooks: Sequence[str]) -> list[str]:
    return [hook for hook in hooks if hasattr(owner, hook) and is_users_hook(owner, hook)]


def users_hooks(trainer: Trainer, hooks: Sequence[str]) -> tuple[str, ...]:
    """List those of ``hooks`` that the user has written, in a module, its data or a callback."""
    data = trainer.datamodule  # type: ignore[attr-defined] # set at run time
    owners = (*owners_of_hooks(trainer), data)
    return tuple(f"{type(o).__name__}.{hook}" for o in owners for hook in _hooks_of(o, hooks))


def hooks_between_batches(trainer: Trainer) -> tuple[str, ...]:
    """List the user's hooks that run between batches which accumulate gradients.

    They may read gradients, or write parameters that later backwards use.
    """
    return users_hooks(trainer, _BETWEEN_BATCHES)


def refuse_different_callbacks(trainer: Trainer) -> None:
    """Raise ``ValueError`` on a rank with other callbacks than global rank 0; all ranks call it."""
    mine = [type(owner).__qualname__ for owner in _owners_of_ends(trainer)]
    _refuse_different_hooks(
        trainer, mine, "run hooks at the end of batches and epochs together, in one order"
    )


def _owners_of_ends(trainer: Trainer) -> list[Any]:
    module, *callbacks = owners_of_hooks(trainer)
    ends = (*_BATCH_END, *_EPOCH_END)
    return [module, *(callback for callback in callbacks if _hooks_of(callback, ends))]


def _refuse_different_hooks(trainer: Trainer, mine: list[str], what_ranks_do: str) -> None:
    root: list[str] = trainer.strategy.broadcast(mine)
    if mine != root:
        raise ValueError(
            f"the ranks of a pipeline {what_ranks_do}; these are those of "
            f"{', '.join(root) or 'none'} on global rank 0, of {', '.join(mine) or 'none'} on "
            f"global rank {trainer.global_rank}; give every rank the same module and callbacks"
        )


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether forwards run hooks of the user's."""
    return any(_forward_hooks(module))


@contextmanager
def without_forward_hooks(module: nn.Module) -> Iterator[None]:
    """Run forwards whose results are dropped, without the user's hooks."""
    hooks_of_modules = [(hooks, [*hooks.items()]) for hooks in _forward_hooks(module) if hooks]
    for hooks, _ in hooks_of_modules:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, registered in hooks_of_modules:
            hooks.update(registered)


def _forward_hooks(module: nn.Module) -> Iterator[dict[int, Any]]:
    # Private: no public name lists the hooks of a module, or those of all modules.
    yield from (_global_forward_hooks, _global_forward_pre_hooks)
    for part in module.modules():
        yield from (part._forward_hooks, part._forward_pre_hooks)


def find_hooked(module: nn.Module) -> str:
    """Return the name of a parameter or module with a hook of the user's; "" if there is none."""
    for name, parameter in module.named_parameters():
        if has_hooks(parameter):
            return name
    for name, part in module.named_modules():
        # Private: no public name lists the hooks of a module.
        kinds = (part._forward_hooks, part._forward_pre_hooks)
        if any((*kinds, part._backward_hooks, part._backward_pre_hooks)):
            return name or type(part).__name__
    return ""


def wrap_gradient_hooks(trainer: Trainer, share: Callable[[], None]) -> list[WrappedHook]:
    """Wrap the user's overrides of Lightning's three hooks for gradients.

    Args:
        trainer: Its module and callbacks have the hooks.
        share: Exchanges the sizes of all gradients, before each hook; all ranks call it together.

    Raises:
        ValueError: This rank has other such hooks than global rank 0.
    """
    owners = owners_of_hooks(trainer)
    hooks = [(owner, hook) for owner in owners for hook in _hooks_of(owner, OF_GRADIENTS)]
    names = [f"{type(owner).__qualname__}.{hook}" for owner, hook in hooks]
    _refuse_different_hooks(trainer, names, "compare gradients before the hooks that may read them")

    def share_first(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        share()
        return plain(*args, **kwargs)

    return [WrappedHook(owner, hook, share_first) for owner, hook in hooks]


def wrap_end_hooks(trainer: Trainer, publish: Callable[[], None]) -> list[WrappedHook]:
    """Wrap the user's hooks at epochs' ends, each followed by ``publish``."""
    owners = _owners_of_ends(trainer)
    hooks = [(owner, hook) for owner in owners for hook in _hooks_of(owner, _EPOCH_END)]
    module = trainer.lightning_module
    if not is_users_hook(module, "on_train_epoch_end"):
        # Callbacks decide after it, on values that other callbacks have logged.
        hooks.append((module, "on_train_epoch_end"))

    def publish_after(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return plain(*args, **kwargs)
        finally:
            publish()

    return [WrappedHook(owner, hook, publish_after) for owner, hook in hooks]


def share_gradient_norms(pipeline: Pipeline) -> None:
    """Exchange norm and largest element of each gradient, and whether there is one.

    One message of three numbers for each parameter of the model. All ranks that share gradients
    call it: those of a pipeline, or of all replicas where each has some of them.
    """
    parameters = [*pipeline.module.parameters()]
    counted = pipeline.gradients.counted_gradients(parameters)
    table = _gradient_norm_table([counted.get(index) for index in range(len(parameters))])
    with reporting_lost_peers("lost a rank while comparing gradients"):
        dist.all_reduce(table, group=pipeline.gradients.group_with_all_gradients.host_group)
    for parameter, (kind, norm, largest) in zip(parameters, table.tolist(), strict=True):
        size = KnownNorms(norm, largest) if kind == _MEASURED else None
        if isinstance(parameter, RemoteTensor):
            parameter.set_remote_gradient(kind != _ABSENT, size)
        elif isinstance(parameter.grad, RemoteGradient):
            parameter.grad.set_norms(size)
            if size is not None:
                pipeline.gradient_changes.invalidate_on_change(size)


def _gradient_norm_table(gradients: list[Tensor | None]) -> Tensor:
    """Return kind, norm and largest element of each gradient in a table on the host, else 0.

    By the operation and in the precision of the user's code, so that every rank has the same bits.
    """
    table = torch.zeros(len(gradients), 3, dtype=torch.float64)
    measured: list[tuple[int, Tensor]] = []
    for index, gradient in enumerate(gradients):
        if gradient is None:
            continue
        table[index, 0] = _THERE
        if gradient.layout is torch.strided and gradient.is_floating_point():
            table[index, 0] = _MEASURED
            if not gradient.numel():
                continue  # which has no largest element
            both = [torch.linalg.vector_norm(gradient, order) for order in (2, math.inf)]
            measured.append((index, torch.stack(both).to(torch.float64)))
    if measured:
        indices = [index for index, _ in measured]
        table[indices, 1:] = torch.stack([both for _, both in measured]).cpu()
    return table
