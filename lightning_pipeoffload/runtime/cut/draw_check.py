"""Refuses a cut that would let the stages of a step draw different numbers."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipeoffload.runtime.cut.partition import Stage
from lightning_pipeoffload.runtime.cut.probe_result import Probe
from lightning_pipeoffload.runtime.users_code.random_sources import Source
from lightning_pipeoffload.runtime.users_code.source_watch import Draw
from lightning_pipeoffload.runtime.users_code.users_lines import in_brackets


def check_repeatable(probe: Probe, stages: Sequence[Stage]) -> None:
    """Check that what several stages compute is the same on each.

    Raises:
        ValueError: Two runs from the same state had different values.
    """
    entry = probe.unrepeatable
    if entry is not None and entry.segment < stages[-1].blocks.start:
        raise ValueError(
            f"{entry.name}(){in_brackets(entry.line)} gives another value each time that the step "
            f"runs, before the last stage, so each stage would have its own; draw it from torch's, "
            f"numpy's or Python's global generator, or from a generator that is an attribute of "
            f"the module, or let the batch bring it"
        )


def drawn_before(probe: Probe, last: Stage) -> list[Source]:
    """List what a rank's other stages draw from too, or change, before its last one comes there.

    What a block draws only the stage draws that runs it.
    """
    return [
        source
        for source, draws in probe.draws.items()
        if any(not d.is_in_block and d.segment < last.blocks.start for d in draws)
    ]


def check_mixed_writes(probe: Probe, stages: Sequence[Stage], stage_ranks: Sequence[int]) -> None:
    """Check that blocks write into nothing shared that the step around them writes too.

    Each stage of a rank runs the step's beginning, and what that has written counts once; what the
    rank's first stages' blocks have put in between would be lost with it.

    Args:
        probe: The probe of the step.
        stages: The stages of the model.
        stage_ranks: The pipeline rank of each.

    Raises:
        ValueError: Blocks do, and a rank has several stages.
    """
    for rank in sorted(set(stage_ranks)):
        *others, last = [stage for stage in stages if stage_ranks[stage.index] == rank]
        blocks = {block for stage in others for block in stage.blocks}
        for source in drawn_before(probe, last):
            inside = {d.segment for d in probe.draws[source] if d.is_in_block} & blocks
            if inside and not source.kind.draws:
                raise ValueError(_describe_mixed(source, min(inside), probe))


def _describe_mixed(source: Source, block: int, probe: Probe) -> str:
    lines = dict.fromkeys(probe.lines.get(source, []))
    where = "".join(in_brackets(line) for line in lines)
    return (
        f"the step writes {source.place.name} in the block at place {block} and beside the blocks "
        f"too{where}, and a rank has several stages, each of which runs the step's beginning; let "
        f"the blocks write into another collection, or take a schedule with one stage per rank"
    )


class DrawCheck:
    """Checks that all stages that draw from a source draw as much, in all kinds of steps.

    Args:
        stages: The stages of the model.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self._draws: dict[tuple[Source, int], bool] = {}

    def check(self, probe: Probe) -> None:
        """Take in one more probe.

        Raises:
            ValueError: A stage draws from a source, but not always when another one does.
        """
        for source, draws in probe.draws.items():
            for stage in self._stages if source.kind.draws else ():
                seen = {draw for draw in draws if comes_to(stage, draw, probe, self._stages)}
                draws_now = bool(seen)
                drew = self._draws.setdefault((source, stage.index), draws_now)
                if drew != draws_now or (seen and seen != draws):
                    raise ValueError(_describe(source, stage, probe))


def comes_to(stage: Stage, draw: Draw, probe: Probe, stages: Sequence[Stage]) -> bool:
    """Whether a stage comes to a place of the step."""
    if not draw.is_in_block:
        return stage is stages[-1] or draw.segment < stage.blocks.stop
    output = probe.flow.outputs[draw.segment]
    runs_foreign = draw.segment in probe.flow.opened or not output.is_template
    is_before = draw.segment < stage.blocks.start
    return draw.segment in stage.blocks or (is_before and runs_foreign)


def _describe(source: Source, stage: Stage, probe: Probe) -> str:
    lines = probe.lines.get(source, [])
    first, last = (in_brackets(line) for line in (lines[0], lines[-1])) if lines else ("", "")
    return (
        f"the step draws from {source.place.name}{first} where stage {stage.index} comes, and also "
        f"where it does not{last}, so it would fall behind the others; draw from two generators, "
        f"or from torch's own, which is seeded for each microbatch"
    )
