"""Makes microbatches of a batch: each a slice of it, with the record of a step on its shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lightning_pipeoffload.runtime import mix_seeds
from lightning_pipeoffload.runtime.batch import BatchParts, BatchStructure
from lightning_pipeoffload.runtime.cut import StepRecord, check_shared_weights
from lightning_pipeoffload.runtime.run.pipeline import Pipeline
from lightning_pipeoffload.runtime.step import Microbatch
from lightning_pipeoffload.runtime.users_code import (
    CallOnCopies,
    StepCall,
    UsersStep,
    copy_shared_tensors,
)


def split_into_microbatches(
    pipeline: Pipeline, batch: Any, size: int, step: UsersStep, kind: str, seed: int
) -> list[Microbatch]:
    """Cut a batch into microbatches of ``size`` samples; see :func:`build_microbatches`."""
    return build_microbatches(
        pipeline, BatchStructure().split(batch, size), batch, step, kind, seed
    )


def build_microbatches(
    pipeline: Pipeline, parts: BatchParts, batch: Any, step: UsersStep, kind: str, seed: int
) -> list[Microbatch]:
    """Make microbatches of a batch's parts, and trace the step for those with new shapes.

    Args:
        pipeline: The module, which is cut at the first batch.
        parts: The parts.
        batch: The batch: any pytree.
        step: The user's step.
        kind: The kind of the step, such as "training_step".
        seed: The seed of the batch.

    Raises:
        ValueError: The step cannot be cut at its blocks; a hook sees part of a gradient.
    """
    pipeline.retrace_if_frozen()
    seeds = mix_seeds((seed,), range(len(parts.parts)))
    records: list[StepRecord] = []
    of_alike: StepRecord | None = None  # of all parts that have as many samples as the first
    for part, num_samples, own_seed in zip(parts.parts, parts.sizes, seeds, strict=True):
        if of_alike is not None and num_samples == parts.sizes[0]:
            records.append(of_alike)
            continue
        records.append(pipeline.find_record_and_cut(kind, part, step, own_seed))
        # Parts of one size have the same shapes; what depends on values differs.
        if parts.are_alike and len(records) == 1 and records[0].holds_for_any_values:
            of_alike = records[0]
    num_slices = pipeline.num_slices_for(records)
    microbatches: list[Microbatch] = []
    for index, (part, record) in enumerate(zip(parts.parts, records, strict=True)):
        run: Callable[[StepCall], Any] = partial(step, part)
        if record.writes.changes_batch:
            batch_of_part = (
                copy_shared_tensors(part, batch) if index < len(parts.parts) - 1 else part
            )
            run = CallOnCopies(step, batch_of_part, len(pipeline.stages) * num_slices)
        microbatches.append(
            Microbatch(
                part,
                parts.sizes[index],
                run,
                record,
                pipeline.device,
                seeds[index],
                is_new=not pipeline.records.has_run(record),
                of_slices=pipeline.records.slice_records(record, num_slices),
            )  # fmt: skip
        )
    shared = pipeline.tensors.shared_weights
    if shared and torch.is_grad_enabled():
        check_shared_weights(shared)
    for each in microbatches:
        if each.is_new:
            pipeline.records.mark_as_run(each.record)
    return microbatches
