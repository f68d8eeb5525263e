"""How a step calls its blocks: refused where a stage could not do so, or not alike in B."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.users_code.users_lines import calling_line, in_brackets


class BlockCalls:
    """The calls of a chain's blocks in one run of a step.

    Args:
        chain: The blocks.
    """

    def __init__(self, chain: BlockChain) -> None:
        self._chain = chain
        self._training = torch.is_grad_enabled()
        self._checkpoint: Any = None
        self._num_hooks: list[int] = []

    def see(self, index: int, expected: int) -> None:
        """Look at a call before it is made.

        Args:
            index: The index of the block.
            expected: Index of the block that comes next.

        Raises:
            ValueError: A stage could not make it; says why and where.
        """
        self._check_order(index, expected)
        self._check_gradients(index)
        self._check_checkpoint(index)
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
