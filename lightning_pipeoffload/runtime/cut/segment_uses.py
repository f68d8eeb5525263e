"""Which segments of a step use each parameter and buffer, as far as steps have shown."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.cut.partition import find_segments
from lightning_pipeoffload.runtime.cut.probe_result import Probe


class SegmentUses:
    """What is learned from one probe after the other.

    Args:
        module: The user's module.
        chain: Its blocks.
        trainable: The names of its parameters.

    Attributes:
        segments: The segments that use each name.
    """

    def __init__(self, module: nn.Module, chain: BlockChain, trainable: Collection[str]) -> None:
        self._module = module
        self._chain = chain
        self._trainable = trainable
        self._computed: set[str] = set()  # buffers that a step writes from what a stage computes
        self.segments: dict[str, set[int]] = {}

    def learn(self, probe: Probe) -> bool:
        """Take in one more probe; return whether anything is used where it was not before."""
        found = find_segments(self._module, self._chain, probe)
        computed = {n for n in found if n not in self._trainable and probe.segments[n]}
        for name in computed - self._computed:  # no stage but these has its value from now on
            self.segments[name] = set()
        self._computed |= computed
        known = self._computed - computed
        learned = {
            name: self.segments.get(name, set()) | (set() if name in known else uses)
            for name, uses in found.items()
        }
        is_new = learned != self.segments
        self.segments = learned
        return is_new
