"""Runs a step as a whole on every rank: what other ranks have is lent while it is used.

For evaluation steps that cannot be cut, as those that generate or that need no block. Every rank
runs the same code on the same values, caches and branches included; a block's weights are sent to
all ranks for the time of its call, those outside of the blocks for the time of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.randomness import mix_seed, seed_all
from lightning_pipeoffload.runtime.users_code.sources import Generators
from lightning_pipeoffload.runtime.users_code.tensor_slots import Slot, find_slots


class Lending:
    """One run of a step as a whole.

    Args:
        module: The user's module.
        chain: Its blocks.
        fetch: Returns the value of a parameter or buffer; all ranks call it for the same ones.
        seed: The seed of the step's random numbers; None: they are drawn on as before.
        part: The part of the module that is called; None: all of it.
    """

    def __init__(
        self,
        module: nn.Module,
        chain: BlockChain,
        fetch: Callable[[Slot], Tensor],
        seed: int | None,
        part: nn.Module | None = None,
    ) -> None:
        self._chain = chain
        self._fetch = fetch
        self._seed = seed
        self._generators = Generators(module)
        self._calls: list[int] = []
        self._glue: list[Slot] = []
        self._inside: dict[int, list[Slot]] = {index: [] for index in range(len(chain))}
        called = {id(child) for child in (part or module).modules()}
        for slot in find_slots(module):
            index = chain.index_of(slot.name)
            block = None if index is None else chain.blocks[index]
            comes_later = block is not None and block is not part and id(block) in called
            if index is not None and (comes_later or id(slot.module) not in called):
                self._inside[index].append(slot)
            elif id(slot.module) in called:
                self._glue.append(slot)

    @property
    def could_be_cut(self) -> bool:
        """Whether the step has called each block once and in order."""
        return self._calls == list(range(len(self._chain)))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the step find all values."""
        with self._chain.running(self), self._lent(self._glue), self._generators.kept():
            self._seed_segment()
            yield

    def _seed_segment(self) -> None:
        if self._seed is not None:
            seed = mix_seed(self._seed, len(self._calls))
            seed_all(seed)
            self._generators.seed(seed)

    def call_block(self, index: int, call: Callable[[], Any], arguments: Any) -> Any:
        """Run a block with what it needs."""
        args, kwargs = arguments
        with self._lent(self._inside[index]):
            output = self._chain.run_block(index, *args, **kwargs)
        self._calls.append(index)
        self._seed_segment()
        return output

    @contextmanager
    def _lent(self, slots: Iterable[Slot]) -> Iterator[None]:
        own = [(slot, slot.tensor) for slot in slots]
        lent: list[tuple[Slot, Tensor, Tensor]] = []
        try:
            for slot, tensor in own:
                value = self._fetch(slot)
                slot.module.__dict__[slot.kind][slot.attribute] = value
                lent.append((slot, tensor, value))
            yield
        finally:
            for slot, tensor, value in lent:
                # What the step has assigned to its own buffers stays.
                if slot.tensor is value or value is not tensor:
                    slot.module.__dict__[slot.kind][slot.attribute] = tensor
