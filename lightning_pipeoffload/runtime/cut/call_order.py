"""The order in which a step calls its blocks.

A **call** is a time: it has random seeds, ports and an output of its own. A **position** is a place
in the chain: it has a stage. Where each block is called once the two are the same number. Two views
of three blocks, on two stages::

    call        0   1   2   3   4   5
    block       0   1   2   0   1   2       the positions of the calls
    stage 0    runs            runs, exit   in one F, which sends both outputs at its end
    stage 1             runs           runs

The code between two calls has the positions of its operands, for the stage that has these runs it:
the output of block k has position k + 1, or k where the next call is of the same block again. No
position is below the least that is still to be called, so that a stage may leave the step behind
the last call of a block before its end. First calls need not be in the order of the chain, which
may have each block of a momentum encoder beside the one that it follows.
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
    def of_once(cls, num_blocks: int) -> CallOrder:
        """Return the order in which each block is called once."""
        return cls(tuple(range(num_blocks)), num_blocks)

    @cached_property
    def is_once(self) -> bool:
        """Whether each block is called once, in the order of the chain."""
        return self.blocks == tuple(range(self.num_blocks))

    @property
    def can_be_cut(self) -> bool:
        """Whether all blocks are called, and block 0 first."""
        return self.blocks[:1] == (0,) and len({*self.blocks}) == self.num_blocks

    @cached_property
    def inseparable(self) -> frozenset[int]:
        """The blocks that no cut should separate from the one before: those called out of order.

        With the number of blocks, for the code behind all, if there are any.
        """
        first = [*dict.fromkeys(self.blocks)]
        descents = [place for place, (a, b) in enumerate(pairwise(first), 1) if b < a]
        return frozenset((*first[descents[0] :], self.num_blocks)) if descents else frozenset()

    @cached_property
    def least(self) -> Sequence[int]:
        """The least position that is still to be called, before each call and behind all."""
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

    def hands_on(self, call: int) -> bool:
        """Return whether a call's output is for later positions: another block is called next."""
        return self.blocks[call : call + 1] != self.blocks[call + 1 : call + 2]

    def position_behind(self, call: int) -> int:
        """Return the position of the code that receives a call's output.

        This is the next position, or that of the block itself if its next call follows.
        """
        return self.blocks[call] + self.hands_on(call)

    def entry(self, block: int) -> int:
        """Return the call, of an earlier block, at which a stage from ``block`` on receives."""
        later = (call for call, called in enumerate(self.blocks) if called >= block)
        first = next(later, len(self.blocks))
        return min(first - 1, *filter(self.hands_on, self.calls_of(block - 1)))

    def last_before(self, block: int) -> int:
        """Return the last call of a block before ``block``, behind which its stage can leave."""
        return max(call for call, called in enumerate(self.blocks) if called < block)

    def is_reached(self, block: int, end: int) -> bool:
        """Return whether a stage that ends before block ``end`` comes to a call of a block."""
        return self.blocks.index(block) <= self.last_before(end)
