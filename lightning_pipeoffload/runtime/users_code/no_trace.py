"""Runs the user's step, with values, so that nothing of it stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_forward_hooks,  # private: hooks of all modules' forwards
    _global_forward_pre_hooks,
)

from lightning_pipeoffload.runtime.randomness import forked_randomness
from lightning_pipeoffload.runtime.users_code.module_snapshot import unchanged
from lightning_pipeoffload.runtime.users_code.sources import Generators


@contextmanager
def leaving_no_trace(module: nn.Module) -> Iterator[None]:
    """Give gradients, buffers, attributes and generators back as they were.

    Parameters that the step writes are for the caller, who knows which these are.

    Args:
        module: The user's module.
    """
    gradients: list[tuple[Tensor, Tensor | None]] = [(p, p.grad) for p in module.parameters()]
    try:
        with forked_randomness(), Generators(module).kept(), unchanged(module):
            for parameter, _ in gradients:
                parameter.grad = None
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether a forward runs hooks of the user's, which may keep a trace."""
    return any(_forward_hooks(module))


@contextmanager
def without_forward_hooks(module: nn.Module) -> Iterator[None]:
    """Run forwards whose results are thrown away, of which no hook of the user's hears."""
    found = [(hooks, [*hooks.items()]) for hooks in _forward_hooks(module) if hooks]
    for hooks, _ in found:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, registered in found:
            hooks.update(registered)


def _forward_hooks(module: nn.Module) -> Iterator[dict[int, Any]]:
    # Private: no public name lists the hooks of a module, or those of all modules.
    yield from (_global_forward_hooks, _global_forward_pre_hooks)
    for part in module.modules():
        yield from (part._forward_hooks, part._forward_pre_hooks)


def hooked(module: nn.Module) -> str:
    """Return the name of what has a hook of the user's, which may keep a trace; empty: nothing."""
    # Private: no public name lists the hooks of a tensor or a module.
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return name
    for name, part in module.named_modules():
        kinds = (part._forward_hooks, part._forward_pre_hooks)
        if any((*kinds, part._backward_hooks, part._backward_pre_hooks)):
            return name or type(part).__name__
    return ""
