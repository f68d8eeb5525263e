"""The order in which a step calls its blocks.

A **call** is a point in time, numbered in the order of the step: it has random seeds, an output and
ports (:mod:`.carried_values`) of its own. A **position** is the index of a block in the chain: it
belongs to a stage. If each block is called once, the two numbers are equal. A step that calls three
blocks on each of two views of a batch, cut into two stages after block 1::

    call        0   1   2   3   4   5
    block       0   1   2   0   1   2    the positions of the calls
    stage 0     x   x       x   x        one F runs them, exits, and sends both outputs of block 1
    stage 1             x           x    one F runs them

An operation between two calls has the largest position of its operands, and runs on the stage of
that position. The output of block k has position k + 1, or k if the next call is of block k again.
No position is below the smallest one that is still to be called. So a stage may leave the step
after the last call of a block before the end of the stage. The first calls of blocks need not be in
the order of the chain: it may hold each block of a momentum encoder next to the original block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class CallOrder:
    """The block of each call of a step.

    Attributes:
        blocks: The index of the block of each call.
        num_blocks: The number of blocks of the chain.
    """

    blocks: tuple[int, ...]
    num_blocks: int

    @classmethod
    def each_block_once(cls, num_blocks: int) -> CallOrder:
        """Return the order in which each block is called once."""
        return cls(tuple(range(num_blocks)), num_blocks)

    @cached_property
    def is_sequential(self) -> bool:
        """Whether each block is called once, in the order of the chain."""
        return self.blocks == tuple(range(self.num_blocks))

    @property
    def can_be_cut(self) -> bool:
        """Whether all blocks are called, and block 0 first."""
        return self.blocks[:1] == (0,) and len({*self.blocks}) == self.num_blocks

    @cached_property
    def inseparable(self) -> frozenset[int]:
        """The blocks that a cut should not separate from the previous block of the chain.

        These are the blocks from the first one on whose first call is out of order. If there are
        any, the number of blocks is one of them, for the code after the last block.
        """
        first = [*dict.fromkeys(self.blocks)]
        descents = [place for place, (a, b) in enumerate(pairwise(first), 1) if b < a]
        return frozenset((*first[descents[0] :], self.num_blocks)) if descents else frozenset()

    @cached_property
    def least_remaining_positions(self) -> Sequence[int]:
        """The smallest position still to be called: before each call, and after the last one."""
        return [*accumulate((self.num_blocks, *reversed(self.blocks)), min)][::-1]

    @cached_property
    def _calls_of(self) -> dict[int, list[int]]:
        calls: dict[int, list[int]] = {block: [] for block in range(self.num_blocks)}
        for call, block in enumerate(self.blocks):
            calls[block].append(call)
        return calls

    def calls_of(self, block: int) -> Sequence[int]:
        """Return the calls of a block."""
        return self._calls_of[block]

    def goes_to_next_position(self, call: int) -> bool:
        """Return whether a call's output goes to the next position: another block follows it."""
        return self.blocks[call : call + 1] != self.blocks[call + 1 : call + 2]

    def position_after(self, call: int) -> int:
        """Return the position of the code that receives a call's output.

        This is the next position, or that of the block itself if its next call follows.
        """
        return self.blocks[call] + self.goes_to_next_position(call)

    def entry_call(self, block: int) -> int:
        """Return the call at which the stage that starts with ``block`` receives its input.

        It is a call of an earlier block, before the first call of the stage's own blocks.
        """
        later = (call for call, called in enumerate(self.blocks) if called >= block)
        first = next(later, len(self.blocks))
        return min(first - 1, *filter(self.goes_to_next_position, self.calls_of(block - 1)))

    def last_call_of_earlier_blocks(self, block: int) -> int:
        """Return the last call of any earlier block: a stage that ends before ``block`` exits."""
        return max(call for call, called in enumerate(self.blocks) if called < block)

    def is_called_before_exit(self, block: int, end: int) -> bool:
        """Return whether a stage that ends before block ``end`` calls ``block`` before it exits."""
        return self.blocks.index(block) <= self.last_call_of_earlier_blocks(end)
