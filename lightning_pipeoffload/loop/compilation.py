"""Compiles the blocks before the first step, on all ranks, which wait for each other."""

from __future__ import annotations

import time

from lightning_pipeoffload.planning.report_text import print_line
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.runtime.step.batch_slice import BatchSlice


def compile_ahead(pipeline: Pipeline, group: PipelineGroup, first: BatchSlice) -> None:
    """Compile each rank's blocks, where any block is compiled; all ranks call it.

    Args:
        pipeline: This rank's part of the module, as it is cut now.
        group: The pipeline's processes.
        first: A microbatch of the first batch.
    """
    if not pipeline.is_compiled:
        return
    if group.reports:
        print_line("Compiling the blocks, on all ranks at once.")
    started = time.monotonic()
    with group.world.waiting_as_long_as_it_takes():
        pipeline.compile_ahead(first)
    if group.reports:
        print_line(f"Compiled in {time.monotonic() - started:.1f} s.")
