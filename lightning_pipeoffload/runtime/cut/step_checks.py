"""Refuses steps that cannot be cut where the module is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.cut.cut_check import check_cut, check_weight_writes
from lightning_pipeoffload.runtime.cut.draw_check import (
    DrawCheck,
    check_mixed_writes,
    check_repeatable,
)
from lightning_pipeoffload.runtime.cut.partition import Stage
from lightning_pipeoffload.runtime.cut.probe_result import Probe
from lightning_pipeoffload.runtime.cut.use_check import UseCheck


class StepChecks:
    """What all kinds of steps of a module are checked for.

    Args:
        chain: The blocks.
        stages: The stages of the whole model.
        stage_ranks: The rank of each.
    """

    def __init__(
        self, chain: BlockChain, stages: Sequence[Stage], stage_ranks: Sequence[int]
    ) -> None:
        self._chain = chain
        self._stages = stages
        self._stage_ranks = stage_ranks
        self._draws = DrawCheck(stages)
        self._uses = UseCheck(chain, stages)

    def check(self, probe: Probe, owners_of: Callable[[str], frozenset[int]]) -> None:
        """Check one more step, alone and beside those before.

        Args:
            probe: The probe of the step.
            owners_of: A function that says which stages have a parameter, under whatever name.

        Raises:
            ValueError: It cannot be cut there; the message says why, and what would do.
        """
        check_weight_writes(probe, self._chain, self._stages, owners_of)
        check_repeatable(probe, self._stages)
        self._draws.check(probe)
        check_mixed_writes(probe, self._stages, self._stage_ranks)
        self._uses.check(probe)
        check_cut(probe, self._chain, self._stages)
