"""The line that says what was cut, each rank's share of the work, and why they are unlike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_pipeoffload.planning.report import block_range_text
from lightning_pipeoffload.runtime.cut import format_blocks_argument, inner_blocks
from lightning_pipeoffload.runtime.run import Pipeline
from lightning_pipeoffload.schedule import share_text

_MOST = 1.5  # times the ranks' mean, without a reason and a remedy
_ALONE = 0.5  # of a rank's work, from which on a segment is the reason


def describe_cut(report: Mapping[str, Any], pipeline: Pipeline) -> str:
    """Return the line for a report; see :func:`.report.predict_figures`."""
    shares = work_shares(report)
    names = pipeline.chain.names
    texts = ", ".join(map(share_text, shares))
    line = f"Cut: {block_range_text(names)}, {len(names)} blocks; work of the ranks: {texts}."
    most = max(shares)
    if most * len(shares) <= _MOST:
        return line
    rank = shares.index(most)
    stages = [i for i, stage in enumerate(report["stages"]) if stage["rank"] == rank]
    times = f"{most * len(shares):.1f} times the mean"
    return f"{line} Rank {rank} has {times}: {_reason(pipeline, stages, most)}."


def work_shares(report: Mapping[str, Any]) -> list[float]:
    """Return each rank's share of the work of F, B and W."""
    shares = [0.0] * report["num_ranks"]
    for stage in report["stages"]:
        shares[stage["rank"]] += stage["work"]
    return shares


def _reason(pipeline: Pipeline, stages: Sequence[int], share: float) -> str:
    """Return what weighs most on a rank, and what to name instead."""
    work, chain = pipeline.cut.segment_costs.work, pipeline.chain
    segments = sorted({s for index in stages for s in pipeline.cut.stages[index].segments})
    heaviest = max(segments, key=work.__getitem__)
    names = chain.names
    if work[heaviest] < _ALONE * sum(work[segment] for segment in segments):
        count = len(names)
        return f"{count} blocks make no better stages; use fewer devices, or leave split at auto"
    of_all = f"{share_text(work[heaviest] / sum(work))} of the work"
    if heaviest == len(chain):
        outside = pipeline.modules_outside_blocks(heaviest)
        named = f"; name these too: {format_blocks_argument(pipeline.module, names + outside)}"
        return f"the code after the blocks has {of_all}{named if outside else ''}"
    inside = inner_blocks(pipeline.module, names[heaviest])
    finer = [*names[:heaviest], *inside, *names[heaviest + 1 :]]
    named = f"; name its parts: {format_blocks_argument(pipeline.module, finer)}"
    before = " and the code before it" if heaviest == 0 else ""
    return f"{names[heaviest]}{before} has {of_all}{named if len(inside) > 1 else ''}"
