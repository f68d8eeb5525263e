"""Refuses steps that cannot be cut where the module is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.cut.cut_check import check_cut, check_weight_writes
from lightning_pipeoffload.runtime.cut.partition import Stage
from lightning_pipeoffload.runtime.cut.probe_result import Probe
from lightning_pipeoffload.runtime.users_code.users_lines import in_brackets


class StepChecks:
    """What all kinds of steps of a module are checked for.

    Args:
        chain: The blocks.
        stages: The stages of the whole model.
    """

    def __init__(self, chain: BlockChain, stages: Sequence[Stage]) -> None:
        self._chain = chain
        self._stages = stages

    def check(self, probe: Probe, owners_of: Callable[[str], frozenset[int]]) -> None:
        """Check one more step, alone and beside those before.

        Args:
            probe: The probe of the step.
            owners_of: A function that says which stages have a parameter, under whatever name.

        Raises:
            ValueError: It cannot be cut there; the message says why, and what would do.
        """
        check_weight_writes(probe, self._chain, self._stages, owners_of)
        _check_repeatable(probe, self._stages)
        check_cut(probe, self._chain, self._stages)


def _check_repeatable(probe: Probe, stages: Sequence[Stage]) -> None:
    """Check that what several stages compute is the same on each."""
    entry = probe.unrepeatable
    if entry is not None and entry.segment < stages[-1].blocks.start:
        raise ValueError(
            f"{entry.name}(){in_brackets(entry.line)} gives another value each time that the step "
            f"runs from the same state, so each stage would have its own; keep what it depends on "
            f"in an attribute of the module, draw it from torch's, numpy's or Python's global "
            f"generator or from a generator that is an attribute of the module, or let the batch "
            f"bring it"
        )
