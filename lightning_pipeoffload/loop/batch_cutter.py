"""A run's batches cut into microbatches, along their samples or by ``make_microbatches``."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from lightning.pytorch import Trainer

from lightning_pipeoffload.loop.data import (
    check_rows,
    count_seen,
    group_sampler_of,
    is_collated_by_torch,
    loader_size,
)
from lightning_pipeoffload.loop.step_calls import StepInputs
from lightning_pipeoffload.planning.report import Progress
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.runtime.batch import BatchParts, BatchStructure, Collation, batch_size
from lightning_pipeoffload.runtime.cut import StepRecord
from lightning_pipeoffload.runtime.run import Pipeline, trace_parts
from lightning_pipeoffload.runtime.step import Microbatch
from lightning_pipeoffload.texts.packed_rows import PackedRowsSampler


class BatchCutter:
    """Cuts the batches of one module's steps.

    Attributes:
        first_batch: What first batches have decided for later ones, to be saved with a fit: the
            samples of the first training batch, with the batch sizes of the loaders, what lists
            are, by kind of step and loader, the blocks that are found by a step's calls, and how
            many packed rows all replicas read at once of each loader.
    """

    def __init__(self, pipeline: Pipeline, settings: PipelineSettings) -> None:
        self._pipeline = pipeline
        self._settings = settings
        self._collations: dict[bool, Collation] = {}  # of training, of evaluations
        self._training_sizes: set[int] = set()
        self._packed: dict[bool, bool] = {}  # of training, of evaluations
        self._num_loaders: Counter[int] = Counter()  # of training, by epoch
        self._structures: dict[str, BatchStructure] = {}
        self._traced: set[str] = set()  # kinds of step
        self.first_batch: dict[str, Any] = {"lists": {}}

    @property
    def by_user(self) -> bool:
        """Whether the strategy has ``make_microbatches``."""
        return self._settings.make_microbatches is not None

    def note_loader(self, loader: Any, trainer: Trainer) -> None:
        """Note who makes the batches of a loader that the trainer is about to read.

        Raises:
            ValueError: It does not go with the settings, or with the entry's loader before it.
        """
        is_training = trainer.training
        by_torch = is_collated_by_torch(loader)
        collation = self._collations.setdefault(is_training, Collation(by_torch))
        collation.by_torch &= by_torch
        size = loader_size(loader)
        if size is not None and not by_torch:
            collation.sizes.add(size)
        if size is not None and is_training:
            self._training_sizes.add(size)
        packs = check_rows(loader, self._settings, is_training, trainer.predicting)
        if packs != self._packed.setdefault(is_training, packs):
            raise ValueError(
                "some loaders of a run make packed rows with PackedRows, and others of it do not; "
                "give all of them collate_fn=PackedRows(...), or run the others apart"
            )
        if is_training:
            epoch = trainer.current_epoch
            self._note_packed_rows(loader, self._num_loaders[epoch], count_seen(trainer))
            self._num_loaders[epoch] += 1

    def _note_packed_rows(self, loader: Any, position: int, num_seen: int) -> None:
        """Note the packed rows of a training batch, before an epoch goes on after ``num_seen``.

        Args:
            loader: One of the loaders that a batch is of.
            position: Its position among them.
            num_seen: The batches of the epoch that a fit that resumes has done.

        Raises:
            ValueError: An epoch that was saved goes on with other batches of packed rows.
        """
        sampler = group_sampler_of(loader)
        if not isinstance(sampler, PackedRowsSampler):
            return
        sizes = [sampler.num_rows, sampler.num_ranks, sampler.max_tokens]
        rows = self.first_batch.setdefault("packed_rows", {})
        saved = rows.get(position, sizes)
        if num_seen and saved != sizes:
            before, now = (
                f"num_rows={rows}, {replicas} replicas and max_tokens={tokens}"
                for rows, replicas, tokens in (saved, sizes)
            )
            raise ValueError(
                f"the fit was saved within an epoch of {before}, and goes on with {now}, whose "
                f"batches are others, so that texts would be read twice or never; resume with the "
                f"same, or from a checkpoint of an epoch's end"
            )
        rows[position] = sizes

    def packs_rows(self, kind: str) -> bool:
        """Whether a row of a batch is one microbatch in a kind of step ("training_step")."""
        return self._packed.get(kind == "training_step", False)

    def leave(self) -> None:
        """Forget the loaders of an entry, at its end."""
        self._packed.clear()
        self._num_loaders.clear()

    def resume(self, first_batch: Mapping[str, Any]) -> None:
        """Continue with what the first batches of a fit that was saved have decided."""
        self.first_batch |= copy.deepcopy(dict(first_batch))
        self._structures.clear()
        if "blocks" in self.first_batch:
            self._pipeline.resume_with(self.first_batch["blocks"])

    def count_first(self, total: int) -> int:
        """Return the samples of the fit's first batch, on which the microbatch size depends.

        ``total`` is the samples of the first batch since the fit was started or resumed: of one
        that goes on within an epoch it may be the short last one.
        """
        sizes = sorted(self._training_sizes)
        if self.first_batch.get("loader_sizes") != sizes:
            self.first_batch |= {"num_samples": total, "loader_sizes": sizes}
        return self.first_batch["num_samples"]

    def count(self, inputs: StepInputs) -> int:
        """Return the samples of a batch; raises a ValueError where that is unclear."""
        return self._structure(inputs).count(inputs.batch)

    def cut(self, inputs: StepInputs, size: int) -> list[Microbatch]:
        """Cut a batch into microbatches of ``size`` samples, the last one possibly smaller."""
        return self.trace(inputs, self.split(inputs, size))

    def split(self, inputs: StepInputs, size: int | Callable[[int], int]) -> BatchParts:
        """Return parts as :meth:`.BatchStructure.split` does."""
        return self._structure(inputs).split(inputs.batch, size)

    def cut_into(self, inputs: StepInputs, count: int, total: int) -> list[Microbatch]:
        """Cut a batch, of ``total`` samples if it is the fit's first, into ``count`` microbatches.

        Of a shorter one as many are made as there are of the same size.
        """
        if self.by_user:
            return self.trace(inputs, self.make_parts(inputs, count))
        parts, sizes, are_alike = self.split(inputs, total // count)
        num = sizes.count(sizes[0])  # a fit may resume before a short batch
        return self.trace(inputs, BatchParts(parts[:num], sizes[:num], are_alike))

    def trace(self, inputs: StepInputs, cut: BatchParts) -> list[Microbatch]:
        """Trace the step for the parts of a batch with new shapes."""
        parts = self._pipeline.parts
        if parts is not None:
            parts.check_filled()
        arguments = self._pipeline, cut, inputs.batch, inputs.step, inputs.kind, inputs.seed
        is_first = inputs.kind not in self._traced
        self._traced.add(inputs.kind)
        with Progress.of(self._pipeline).during("tracing") if is_first else nullcontext():
            microbatches = trace_parts(*arguments)
        blocks = self._pipeline.called_blocks
        if blocks is not None:
            self.first_batch["blocks"] = blocks
        return microbatches

    def record_of_first(self, inputs: StepInputs, size: int) -> StepRecord | None:
        """Return the step on the first ``size`` samples; None if it fails with so many.

        No batch is cut so: the error is of no microbatch that runs.
        """
        try:
            part = self.split(inputs, size).parts[0]
            return self._pipeline.records.find(inputs.kind, part, inputs.step, inputs.seed)
        except Exception:
            return None

    def make_parts(self, inputs: StepInputs, count: int, may_be_fewer: bool = False) -> BatchParts:
        """Return the batches that ``make_microbatches`` makes of one.

        Args:
            inputs: The batch.
            count: The number of microbatches.
            may_be_fewer: Whether fewer suffice: of a batch that is not the first.

        Raises:
            ValueError: They are not so many, or their samples cannot be counted.
            TypeError: They are no list.
        """
        make = self._settings.make_microbatches
        assert make is not None
        batches = make(inputs.batch, count)
        if not isinstance(batches, list):
            raise TypeError(
                f"make_microbatches returned a {type(batches).__name__} in {inputs.kind}; it must "
                f"return a list of {count} batches"
            )
        if len(batches) != count and not (may_be_fewer and 0 < len(batches) < count):
            at_most = "at most " if may_be_fewer else ""
            raise ValueError(
                f"make_microbatches returned a list of {len(batches)} for num_microbatches={count} "
                f"in {inputs.kind}; it must return {at_most}{count} batches, or set "
                f"num_microbatches to how many it can make"
            )
        return BatchParts(batches, [*map(self._count_part, batches)], are_alike=False)

    def _count_part(self, part: Any) -> int:
        try:
            return batch_size(part)
        except ValueError as error:
            if self._settings.microbatch_weight != "samples":
                return 1
            reason = str(error).partition(";")[0]
            raise ValueError(
                f'microbatch_weight="samples" cannot count the samples of what make_microbatches '
                f"returned ({reason}); give microbatch_weight a callable of the microbatch that "
                f"returns how many samples its loss is a mean of"
            ) from None

    def _structure(self, inputs: StepInputs) -> BatchStructure:
        key = f"{inputs.kind} {inputs.loader}"
        if key not in self._structures:
            collation = self._collations.get(inputs.kind == "training_step")
            lists = self.first_batch["lists"].setdefault(key, {})
            self._structures[key] = BatchStructure(collation, lists)
        return self._structures[key]
