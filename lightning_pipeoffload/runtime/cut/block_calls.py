"""How a step calls its blocks: refused where a stage could not do so, or not alike in B."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map  # private: see runtime/leaves

from lightning_pipeoffload.runtime.compiled.block_compiler import is_compiled
from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.users_code.users_lines import calling_line, in_brackets


def loss_in(result: Any) -> Tensor:
    """Find the loss in what a training step returned, as Lightning does.

    Raises:
        ValueError: There is no loss in it.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        returned = "None" if result is None else type(result).__name__
        raise ValueError(
            f"the training step returned {returned} without a loss; a pipeline cannot skip a "
            f"batch, whose backward the other stages wait for: call the blocks all the same, and "
            f"return a loss times 0"
        )
    return loss


@dataclass(frozen=True)
class BlockCall:
    """One call of a block as training makes it, but for the values.

    Attributes:
        arguments: Its arguments, those without values described.
        autocast: The dtype that autocast computes in; None: it is off.
        device_type: The type of device that autocast is for.
    """

    arguments: Any
    autocast: torch.dtype | None
    device_type: str

    @classmethod
    def of(cls, arguments: Any, device_type: str) -> BlockCall:
        """Describe the call that is being made."""
        is_on = torch.is_autocast_enabled(device_type)
        autocast = torch.get_autocast_dtype(device_type) if is_on else None
        return cls(tree_map(_describe, arguments), autocast, device_type)

    @contextmanager
    def with_zeros(self) -> Iterator[Any]:
        """Return the arguments with zeros for values; inside, autocast is as it was."""
        with torch.autocast(self.device_type, self.autocast, enabled=self.autocast is not None):
            yield tree_map(_make_zeros, self.arguments)


@dataclass(frozen=True)
class _Argument:
    meta: Tensor
    device: torch.device
    requires_grad: bool


def _describe(leaf: Any) -> Any:
    if not isinstance(leaf, ShapeOnly):
        return leaf
    return _Argument(leaf.meta.detach(), leaf.device, leaf.requires_grad)


def _make_zeros(leaf: Any) -> Any:
    if not isinstance(leaf, _Argument):
        return leaf
    zeros = torch.zeros_like(leaf.meta, device=leaf.device)
    return zeros.requires_grad_(leaf.requires_grad)


class BlockCalls:
    """The calls of a chain's blocks in one run of a step.

    Attributes:
        found: The calls of blocks, where any part of one is compiled.
    """

    def __init__(self, chain: BlockChain, device: torch.device) -> None:
        self._device_type = device.type
        self._keeps = any(is_compiled(block) for block in chain.blocks)
        self.found: list[BlockCall] = []
        self._chain = chain
        self._training = torch.is_grad_enabled()
        self._checkpoint: Any = None
        self._num_hooks: list[int] = []

    def see(self, index: int, expected: int, arguments: Any) -> None:
        """Look at a call before it is made.

        Raises:
            ValueError: A stage could not make it; says why and where.
        """
        self._check_order(index, expected)
        self._check_gradients(index)
        self._check_checkpoint(index)
        if self._keeps:
            self.found.append(BlockCall.of(arguments, self._device_type))
        self._num_hooks.append(_count_hooks(self._chain.blocks[index]))

    def _check_order(self, index: int, expected: int) -> None:
        if index == expected:
            return
        what = f"before {self._chain.block_name(expected)}" if index > expected else "again"
        raise ValueError(
            f"the step calls {self._chain.block_name(index)} {what}"
            f"{in_brackets(calling_line())}; a pipeline needs each entry of {self._chain.name} "
            f"called once and in order"
        )

    def _check_gradients(self, index: int) -> None:
        if self._training and not torch.is_grad_enabled():
            raise ValueError(
                f"the step calls {self._chain.block_name(index)} without gradients"
                f"{in_brackets(calling_line())}: leave out torch.no_grad(), and write "
                f"checkpoint(..., use_reentrant=False)"
            )

    def _check_checkpoint(self, index: int) -> None:
        outer, self._checkpoint = self._checkpoint, _checkpoint_around()
        if outer is not None and outer is self._checkpoint:
            raise ValueError(
                f"the step checkpoints {self._chain.block_name(index - 1)} and "
                f"{self._chain.block_name(index)} together"
                f"{in_brackets(calling_line())}; a stage can only compute its own blocks again, so "
                f"checkpoint each by itself, or leave it to "
                f'recompute="full"'
            )

    def check_complete(self, expected: int) -> None:
        """Check that no block is left when the step is over.

        Args:
            expected: Index of the block that comes next; their number: none does.

        Raises:
            ValueError: A block is not called.
        """
        if expected < len(self._chain):
            raise ValueError(
                f"the step does not call {self._chain.block_name(expected)}; a pipeline needs "
                f"each entry of {self._chain.name} called once and in order"
            )

    def find_briefly_hooked(self) -> Iterator[int]:
        """Yield the blocks that had more hooks when they were called than they have now."""
        for index, (block, before) in enumerate(
            zip(self._chain.blocks, self._num_hooks, strict=False)
        ):
            if _count_hooks(block) < before:
                yield index


def _count_hooks(block: nn.Module) -> int:
    # Private: which hooks a module has can be seen nowhere else.
    return len(block._forward_hooks) + len(block._forward_pre_hooks)


def _checkpoint_around() -> Any:
    """Return what is the same while one checkpoint's function runs; None outside of any."""
    # Private: nothing public tells of a checkpoint, in which blocks are called again in B.
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or not hooks[0].__qualname__.startswith("_checkpoint_hook."):
        return None
    return hooks[0]
