"""Tells whether ranks draw the same numbers from generators of the user's own.

A generator that is seeded from the operating system's entropy has another state in each process,
and what a step draws from it before its blocks would not be the same on its stages.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from torch import Tensor

from lightning_pipeoffload.runtime.cut.probe_result import Probe
from lightning_pipeoffload.runtime.users_code.random_sources import Source, take_snapshot
from lightning_pipeoffload.runtime.users_code.source_watch import Draw

_BEFORE_BLOCKS = Draw(0, is_in_block=False)


class SourceDigest:
    """The generators from which every stage of a model draws."""

    def __init__(self) -> None:
        self._sources: dict[Source, None] = {}

    def expect(self, probe: Probe) -> None:
        """Learn what a step draws from before its first block."""
        for source, draws in probe.draws.items():
            if source.kind.draws and _BEFORE_BLOCKS in draws:
                self._sources[source] = None

    @property
    def names(self) -> str:
        """What the user calls the generators."""
        return ", ".join(source.place.name for source in self._sources)

    def now(self) -> int:
        """Return a number that tells their states apart; 0 where there are none."""
        digest = 0
        for source in self._sources:
            snapshot = take_snapshot(source)
            if snapshot is not None:
                digest = _add(digest, snapshot.state)
        return digest


def _add(digest: int, state: Any) -> int:
    if isinstance(state, Tensor):
        return zlib.crc32(state.cpu().numpy().tobytes(), digest)
    if isinstance(state, np.ndarray):
        return zlib.crc32(state.tobytes(), digest)
    if isinstance(state, dict):
        for name in sorted(state):
            digest = _add(digest, state[name])
        return digest
    if isinstance(state, (list, tuple)):
        for part in state:
            digest = _add(digest, part)
        return digest
    # Of other things only what they are: two processes have them at other addresses.
    known = state if isinstance(state, (int, float, str, type(None))) else type(state).__name__
    return zlib.crc32(repr(known).encode(), digest)
