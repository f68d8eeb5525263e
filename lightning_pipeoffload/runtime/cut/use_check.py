"""Refuses a cut that would let a stage read what another one has written in an earlier step."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.cut.draw_check import comes_to
from lightning_pipeoffload.runtime.cut.partition import Stage
from lightning_pipeoffload.runtime.cut.probe_result import Probe
from lightning_pipeoffload.runtime.users_code.attribute_uses import Use, Uses
from lightning_pipeoffload.runtime.users_code.source_watch import Draw
from lightning_pipeoffload.runtime.users_code.users_lines import in_brackets

_Stages = list[int]


class UseCheck:
    """Checks that each stage that reads what a step has kept has written it, in all kinds of steps.

    Args:
        chain: The blocks.
        stages: The stages of the model.
    """

    def __init__(self, chain: BlockChain, stages: Sequence[Stage]) -> None:
        self._chain = chain
        self._stages = stages
        self._reads: dict[tuple[int, str], list[tuple[Use, _Stages]]] = {}
        self._writes: dict[tuple[int, str], list[tuple[Use, _Stages]]] = {}

    def check(self, probe: Probe) -> None:
        """Take in one more probe.

        Raises:
            ValueError: A stage reads what it does not write, but another one does.
        """
        for key, uses in probe.uses.items():
            self._check_own(uses, probe)
            reads = self._reads.setdefault(key, [])
            writes = self._writes.setdefault(key, [])
            reads += [(use, self._reached(use, probe)) for use in uses.reads_that_count()]
            writes += [(use, self._reached(use, probe)) for use in uses.writes]
            for read, readers in reads:
                for write, writers in writes:
                    if not set(readers) <= set(writers):
                        raise ValueError(self._describe(uses, read, write, max(writers)))

    def _check_own(self, uses: Uses, probe: Probe) -> None:
        for read, write in uses.reads_of_own:
            writers = self._reached(write, probe)
            if not set(self._reached(read, probe)) <= set(writers):
                raise ValueError(
                    f"{uses.label} is written {self._where(write.place)}{in_brackets(write.line)}, "
                    f"and read {self._where(read.place)}{in_brackets(read.line)} by stages that do "
                    f"not run that; hand it on as a tensor, or compute it before the blocks"
                )

    def _reached(self, use: Use, probe: Probe) -> _Stages:
        return [s.index for s in self._stages if comes_to(s, use.place, probe, self._stages)]

    def _describe(self, uses: Uses, read: Use, write: Use, last_writer: int) -> str:
        is_last = last_writer == self._stages[-1].index
        where = "only the last stage comes" if is_last else "not every stage comes"
        return (
            f"{uses.label} is written {self._where(write.place)}{in_brackets(write.line)}, "
            f"where {where}, and what an earlier step has left there is read "
            f"{self._where(read.place)}{in_brackets(read.line)}, by stages that would not have it; "
            f"read it behind the blocks too, or write it in a hook, from what every rank has"
        )

    def _where(self, place: Draw) -> str:
        if place.is_in_block:
            return f"in {self._chain.block_name(place.segment)}"
        if place.segment == len(self._chain):
            return "behind the blocks"
        if place.segment == 0:
            return "before the blocks"
        return f"before {self._chain.block_name(place.segment)}"
