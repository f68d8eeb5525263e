"""What a microbatch's F saw, for its B: tensors that steps write, and blocks that run again.

On one device a microbatch's backward follows its forward. Here forwards of others come in between,
and ``self.head.weight.data.mul_(0.99)`` would reach what autograd keeps of the earlier ones,
without a word where ``.data`` counts no version. So B finds in these tensors what F has left there.

A block that is computed again goes through ``torch.utils.checkpoint``, with what it leaves out:
Python's and numpy's random numbers are the same again, and buffers that the block writes, such as
running statistics, are written once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves  # private: see runtime/leaves
from torch.utils.checkpoint import checkpoint

from lightning_pipeoffload.runtime.cut.ownership import Ownership
from lightning_pipeoffload.runtime.randomness import RandomnessReplay, forked_randomness
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly

# How autograd says that what it keeps was written: the shape, and how often.
_WRITTEN = re.compile(r"modified by an inplace operation: .*\[([\d, ]*)\]\].*is at version (\d+)")


def refuse_late_writes(error: RuntimeError, ownership: Ownership) -> None:
    """Say by name which buffer was written before a backward that reads it, if that is the error.

    Raises:
        RuntimeError: It is: the buffer was not written when the step was first run.
    """
    found = _WRITTEN.search(str(error))
    for slot in ownership.slots if found else ():
        tensor = slot.tensor
        if slot.kind != "_buffers" or isinstance(tensor, ShapeOnly):
            continue
        if found and found.groups() == (str([*tensor.shape])[1:-1], str(tensor._version)):
            raise RuntimeError(
                f"the step writes the buffer {slot.name} in place, which it did not when it was "
                f"first run, so other microbatches' backwards do not find what their forwards "
                f"have seen; write it in every step, the first one too, or assign a new tensor "
                f"(self.{slot.attribute} = self.{slot.attribute} * factor)"
            ) from error


class SeenValues:
    """What tensors hold at one moment."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        # Private: autograd compares versions. A new .data counts none, and is another storage.
        self._seen = [(t, t.data, t.detach().clone(), t._version) for t in tensors]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Let the tensors hold again what they held, inside."""
        now = SeenValues(tensor for tensor, *_ in self._seen)
        self._put()
        try:
            yield
        finally:
            now._put()

    def _put(self) -> None:
        for tensor, data, value, version in self._seen:
            data.copy_(value)
            if tensor.data_ptr() != data.data_ptr():
                tensor.data = data
            # Private: the counter is shared by all views that autograd has saved.
            torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def run_checkpointed(
    block: nn.Module,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    written: Iterable[Tensor] = (),
) -> Any:
    """Return ``call(*args, **kwargs)``, which runs again in the backward.

    A block that is checkpointed by the user's model already is run as it is.

    Raises:
        ValueError: The block writes its input in place, so it cannot run again.
    """
    if not torch.is_grad_enabled() or _is_checkpointed(block):
        return call(*args, **kwargs)
    before = _Before(block, written)
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    versions = [tensor._version for tensor in inputs]
    output = checkpoint(
        call,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,  # replayed here, with Python's and numpy's
        context_fn=before.contexts,
        **kwargs,
    )
    before.drop_unwritten()
    if [tensor._version for tensor in inputs] != versions:
        raise ValueError(
            f'recompute="full" cannot run {type(block).__name__} again, which writes its input in '
            f'place; take inplace=True out of it, or use recompute="cheap"'
        )
    return output


class _Before:
    def __init__(self, block: nn.Module, written: Iterable[Tensor]) -> None:
        self._randomness = RandomnessReplay()
        self._weights = SeenValues(written)
        self._buffers = [
            (child, name, buffer.clone(), buffer._version)
            for child in block.modules()
            for name, buffer in child._buffers.items()
            if buffer is not None
        ]

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), self.replayed()

    def drop_unwritten(self) -> None:
        self._buffers = [
            (child, name, value, version)
            for child, name, value, version in self._buffers
            if _counts_no_versions(child) or _buffer(child, name)._version != version
        ]

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Run inside what was run then; nothing outside notices."""
        found = [(child, name, _buffer(child, name)) for child, name, _, _ in self._buffers]
        for child, name, value, _ in self._buffers:
            child._buffers[name] = value.clone()
        try:
            with forked_randomness(), self._weights.again():
                self._randomness.restore()
                yield
        finally:
            for child, name, buffer in found:
                child._buffers[name] = buffer


def _buffer(module: nn.Module, name: str) -> Tensor:
    buffer = module._buffers[name]
    assert buffer is not None
    return buffer


def _counts_no_versions(module: nn.Module) -> bool:
    return hasattr(module, "track_running_stats")


def _is_checkpointed(block: nn.Module) -> bool:
    if getattr(block, "gradient_checkpointing", False) and block.training:
        return True  # a block of Hugging Face, which does it inside of its call
    # Private: nothing public tells of a checkpoint around.
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__module__
