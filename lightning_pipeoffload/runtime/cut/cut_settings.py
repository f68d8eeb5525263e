"""How a module is to be cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CutSettings:
    """How to cut.

    Attributes:
        stage_ranks: The pipeline rank of each stage.
        blocks: The container's name, or patterns; see :func:`.block_chain.find_chain`.
        split: See :func:`.partition.cut`.
        recompute: See :class:`.stage_pass.StageContext`.
        global_ranks: The global ranks of each stage, for messages; (): as those of the pipeline.
        agree: A function that returns replica 0's of what each replica gives it: its costs, as they
            have to cut alike.
        compile: See :class:`.block_compiler.BlockCompiler`.
    """

    stage_ranks: tuple[int, ...]
    blocks: str | Sequence[str] | None = None
    split: str | Sequence[int] = "auto"
    recompute: str = "none"
    global_ranks: tuple[int, ...] = ()
    agree: Callable[[Any], Any] = lambda own: own
    compile: bool | Mapping[str, Any] = False

    @property
    def places(self) -> tuple[int, ...]:
        """The rank of each stage, as messages name it."""
        return self.global_ranks or self.stage_ranks
