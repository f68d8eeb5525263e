"""Compiles the blocks of all ranks at once, before the first step."""

from __future__ import annotations

import time
from functools import partial

from lightning_pipeoffload.planning.report import print_line
from lightning_pipeoffload.runtime.cut import StepRecord
from lightning_pipeoffload.runtime.run import Pipeline


def compile_ahead(pipeline: Pipeline, record: StepRecord) -> None:
    """Compile each rank's blocks before they run, where any is compiled; all ranks call it.

    It may take one of them longer than ranks wait for each other elsewhere.
    """
    if not pipeline.compiler.has_compiled_blocks:
        return
    group = pipeline.group
    if group.is_global_zero:
        print_line("Compiling the blocks, on all ranks at once.")
    started = time.monotonic()
    with group.world.untimed_barrier_on_exit():
        chain = pipeline.chain
        for stage in pipeline.tensors.local_stages:
            for index in pipeline.cut.stages[stage].blocks:
                first = record.arguments.calls[record.calls.blocks.index(index)]
                with first.zero_arguments() as (args, kwargs):
                    call = partial(chain.plain_calls[index], *args, **kwargs)
                    pipeline.compiler.compile_ahead(chain.blocks[index], call)
    if group.is_global_zero:
        print_line(f"Compiled in {time.monotonic() - started:.1f} s.")
