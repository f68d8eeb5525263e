"""A block that is computed again in the backward (``recompute="full"``).

It uses ``torch.utils.checkpoint``, with two additions: the recomputation draws the same random
numbers of Python and numpy, and works on copies of the buffers that the block writes, such as
running statistics, which are updated only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map  # private: see runtime/leaves
from torch.utils.checkpoint import checkpoint

from lightning_pipeoffload.runtime import RandomStateSnapshot, forked_randomness
from lightning_pipeoffload.runtime.users_code import RandomGenerators, Slot, TensorSnapshot, swapped
from lightning_pipeoffload.runtime.weight_grad import saving_hooks


class RecomputedCall(partial[Any]):
    """A block's call that this package checkpoints, not the user."""


def run_checkpointed(
    block: nn.Module,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    written: Iterable[Tensor] = (),
    generators: RandomGenerators | None = None,
) -> Any:
    """Return ``call(*args, **kwargs)``; the backward recomputes what autograd would have saved.

    A block that the user's model already checkpoints is just called.

    Args:
        block: The block, whose buffers are restored for the recomputation.
        call: Runs the block.
        args: The arguments of the block.
        kwargs: The keyword arguments of the block.
        written: Tensors that steps write in place; the recomputation sees their values during F.
        generators: The random generators that modules hold.
    """
    if not torch.is_grad_enabled() or _is_checkpointed(block):
        return call(*args, **kwargs)
    before = _StateBefore(block, written, generators)
    args, kwargs = tree_map(lambda leaf: leaf, (args, kwargs))  # the step may fill a list later
    output = checkpoint(
        RecomputedCall(call),
        *args,
        use_reentrant=False,
        preserve_rng_state=False,  # replayed here, with Python's and numpy's
        context_fn=before.contexts,
        **kwargs,
    )
    before.drop_unwritten()
    return output


class _StateBefore:
    def __init__(
        self, block: nn.Module, written: Iterable[Tensor], generators: RandomGenerators | None
    ) -> None:
        self._randomness = RandomStateSnapshot()
        self._of_modules = generators.replay() if generators is not None else nullcontext
        self._weights = TensorSnapshot(written)
        self._buffers = [
            (Slot(name, child, name, "_buffers"), buffer.clone(), buffer._version)
            for child in block.modules()
            for name, buffer in child._buffers.items()
            if buffer is not None
        ]

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), self.replayed()

    def drop_unwritten(self) -> None:
        self._buffers = [
            (slot, value, version)
            for slot, value, version in self._buffers
            if _counts_no_versions(slot.module) or slot.tensor._version != version
        ]

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Within the context, restore the forward's random numbers, buffers and weights."""
        buffers = swapped([(slot, value.clone()) for slot, value, _ in self._buffers])
        with buffers, forked_randomness(), self._of_modules(), self._weights.restored():
            self._randomness.restore()
            yield


def _counts_no_versions(module: nn.Module) -> bool:
    return hasattr(module, "track_running_stats")


def _is_checkpointed(block: nn.Module) -> bool:
    if getattr(block, "gradient_checkpointing", False) and block.training:
        return True  # a block of Hugging Face, which does it inside of its call
    hooks = saving_hooks()  # a checkpoint's, or those of its second run
    return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__module__
