"""Refuses calls of blocks, while a step is traced, that no stage could make."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves  # private: see runtime/leaves

from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.cut.call_order import CallOrder
from lightning_pipeoffload.runtime.shapes import code_of, subclasses_of
from lightning_pipeoffload.runtime.users_code import in_brackets, running_frames, running_user_line
from lightning_pipeoffload.runtime.weight_grad import saving_hooks


def describe_required_calls(chain: BlockChain) -> str:
    """Return the condition that a step must satisfy, for errors."""
    return f"a pipeline needs all entries of {chain.name} called, for the first time in their order"


class CallsError(ValueError):
    """The step does not call the blocks of the chain in an order in which it can be cut."""


class OrderError(CallsError):
    """The step calls another block than was expected."""


class RepeatedCallError(OrderError):
    """The step calls a block again where another block was expected."""


class CallChecks:
    """Refuses calls of blocks that a stage cannot make, or cannot recompute in B."""

    def __init__(self, chain: BlockChain, calls: CallOrder) -> None:
        self._chain, self._calls = chain, calls
        self._training = torch.is_grad_enabled()
        self._checkpoint: Any = None
        self._last = 0

    def check(self, index: int, call: int) -> None:
        """Raise ``ValueError`` if a stage could not make this call of block ``index``."""
        self._check_order(index, call)
        self._check_function(index)
        self._check_checkpoint(index)

    def _check_order(self, index: int, call: int) -> None:
        expected = self._calls.blocks[call] if call < len(self._calls.blocks) else len(self._chain)
        if index == expected:
            return
        is_before = index > expected
        what = f"before {self._chain.block_name(expected)}" if is_before else "again"
        raise (OrderError if is_before else RepeatedCallError)(
            f"the step calls {self._chain.block_name(index)} {what}"
            f"{in_brackets(running_user_line())}; {describe_required_calls(self._chain)}"
        )

    def _check_function(self, index: int) -> None:
        if self._training and is_in_autograd_function():
            raise CallsError(
                f"the step calls {self._chain.block_name(index)} in an autograd function"
                f"{in_brackets(running_user_line())}, which makes its graph in the backward: write "
                f"checkpoint(..., use_reentrant=False)"
            )

    def _check_checkpoint(self, index: int) -> None:
        outer, self._checkpoint = self._checkpoint, running_checkpoint()
        if outer is not None and outer is self._checkpoint:
            raise ValueError(
                f"the step checkpoints {self._chain.block_name(self._last)} and "
                f"{self._chain.block_name(index)} together"
                f"{in_brackets(running_user_line())}; a stage can only compute its own blocks "
                f"again, so checkpoint each by itself, or leave it to "
                f'recompute="full"'
            )
        self._last = index

    def check_complete(self, num_made: int) -> None:
        """Raise ``CallsError`` if the step has ended after too few calls: ``num_made``."""
        missing = self._calls.blocks[num_made:]
        if missing:
            raise CallsError(
                f"the step does not call {self._chain.block_name(missing[0])}; "
                f"{describe_required_calls(self._chain)}"
            )


def is_in_autograd_function() -> bool:
    """Whether the forward of an autograd function is running, such as a reentrant checkpoint."""
    if torch.is_grad_enabled():
        return False
    # With a setup_context it gets no ctx; what calls it has no frame from torch 2.14 on.
    forwards = {id(code_of(function.forward)) for function in subclasses_of(Function)}
    return any(id(frame.f_code) in forwards for frame in running_frames())


def running_checkpoint() -> Any:
    """Return an object that identifies the running checkpoint; None if none runs."""
    # Private: no public API shows that a checkpoint runs, whose blocks are called again in B.
    hooks = saving_hooks()
    if hooks is None or not hooks[0].__qualname__.startswith("_checkpoint_hook."):
        return None
    return hooks[0]


def refuse_packed(output: Any, name: str) -> None:
    """Refuse a block's output with a ``PackedSequence``: its lengths would cross as a tensor.

    Raises:
        ValueError: There is one.
    """
    leaves = tree_leaves(output, is_leaf=lambda part: isinstance(part, PackedSequence))
    if any(isinstance(leaf, PackedSequence) for leaf in leaves):
        raise ValueError(
            f"{name} returns a PackedSequence{in_brackets(running_user_line())}, whose lengths "
            f"later stages need on the CPU: let the block take padded sequences and the lengths, "
            f"call pack_padded_sequence, and return what pad_packed_sequence gives"
        )
