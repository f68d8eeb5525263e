"""Compiles the blocks before the first step, on all ranks, which wait for each other."""

from __future__ import annotations

import time
from functools import partial

from lightning_pipeoffload.planning.report import print_line
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.pipeline import Pipeline


def compile_ahead(pipeline: Pipeline, group: PipelineGroup) -> None:
    """Compile each rank's blocks, where any block is compiled; all ranks call it.

    Args:
        pipeline: This rank's part of the module, as it is cut now, for a batch that it has cut.
        group: The pipeline's processes.
    """
    if not pipeline.compiler.has_work:
        return
    if group.reports:
        print_line("Compiling the blocks, on all ranks at once.")
    started = time.monotonic()
    with group.world.waiting_as_long_as_it_takes():
        _compile(pipeline)
    if group.reports:
        print_line(f"Compiled in {time.monotonic() - started:.1f} s.")


def _compile(pipeline: Pipeline) -> None:
    chain, calls = pipeline.chain, pipeline.batch_records[0].block_calls
    local = [pipeline.partition[stage] for stage in pipeline.local_stages]
    for index in [index for stage in local for index in stage.blocks]:
        with calls[index].with_zeros() as (args, kwargs):
            call = partial(chain.plain_call(index), *args, **kwargs)
            pipeline.compiler.compile_ahead(chain.blocks[index], call)
