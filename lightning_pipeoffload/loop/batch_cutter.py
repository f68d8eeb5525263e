"""A run's batches cut into microbatches, along their samples or by ``make_microbatches``."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from lightning.pytorch import Trainer

from lightning_pipeoffload.loop.data import (
    check_rows,
    count_resumed_batches,
    group_sampler_of,
    is_collated_by_torch,
    loader_size,
)
from lightning_pipeoffload.loop.microbatches import (
    MicrobatchWeights,
    least_samples,
    may_mix_samples,
)
from lightning_pipeoffload.loop.plans import Plans
from lightning_pipeoffload.loop.step_calls import StepInputs
from lightning_pipeoffload.planning.report import Progress
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.runtime.batch import (
    BatchParts,
    BatchStructure,
    Collation,
    Samples,
    batch_size,
)
from lightning_pipeoffload.runtime.cut import StepRecord
from lightning_pipeoffload.runtime.run import Pipeline, build_microbatches
from lightning_pipeoffload.runtime.step import Microbatch
from lightning_pipeoffload.texts.packed_rows import PackedRowsSampler


class BatchCutter:
    """Cuts the batches of one module's steps.

    Args:
        pipeline: This rank's part of the module, which is cut at the first batch.
        settings: The strategy's settings.
        plans: Makes the plan at the first training batch, whose microbatches are of the size that
            all later ones have.
        loss_weights: Warns where that size changes the loss.

    Attributes:
        microbatch_size: Samples of a microbatch of training; 0 before the first batch.
        first_batch: What first batches have decided for later ones, to be saved with a fit: the
            samples of the first training batch, with the batch sizes of the loaders, what lists
            are, by kind of step and loader, the blocks that are found by a step's calls, and how
            many packed rows all replicas read at once of each loader.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        settings: PipelineSettings,
        plans: Plans,
        loss_weights: MicrobatchWeights,
    ) -> None:
        self._pipeline, self._settings = pipeline, settings
        self._plans, self._loss_weights = plans, loss_weights
        self.microbatch_size = 0
        self._collations: dict[bool, Collation] = {}  # of training, of evaluations
        self._training_sizes: set[int] = set()
        self._packed: dict[bool, bool] = {}  # of training, of evaluations
        self._num_loaders: Counter[int] = Counter()  # of training, by epoch
        self._structures: dict[str, BatchStructure] = {}
        self._traced: set[str] = set()  # kinds of step
        self._cuts_predictions: dict[int, bool] = {}  # of each loader
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
            self._note_packed_rows(loader, self._num_loaders[epoch], count_resumed_batches(trainer))
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

    def forget_loaders(self) -> None:
        """Forget the loaders of an entry, at its end."""
        self._packed.clear()
        self._num_loaders.clear()
        self._cuts_predictions.clear()

    def restore_first_batch(self, first_batch: Mapping[str, Any]) -> None:
        """Continue with what the first batches of a fit that was saved have decided."""
        self.first_batch |= copy.deepcopy(dict(first_batch))
        self._structures.clear()
        if "blocks" in self.first_batch:
            self._pipeline.use_saved_blocks(self.first_batch["blocks"])

    # A training batch

    def cut_training_batch(self, inputs: StepInputs) -> list[Microbatch]:
        """Cut a batch into microbatches of the first batch's size; a shorter one into fewer.

        The first batch also makes the plan, and cuts the module.

        Raises:
            ValueError: The batch has no samples, or it or the step cannot be cut.
        """
        is_first = not self.microbatch_size
        if not self.by_user:
            microbatches = self._cut_by_size(inputs)
        elif is_first:
            microbatches = self._cut_first_by_user(inputs)
        else:
            microbatches = self.build_microbatches(inputs, self.make_user_microbatches(inputs))
        if is_first and len(microbatches) > 1:
            self._warn_of_differences(inputs, microbatches)
        return microbatches

    def _cut_by_size(self, inputs: StepInputs) -> list[Microbatch]:
        samples = self._structure(inputs).samples_of(inputs.batch)
        if not samples.num:
            raise ValueError(
                f"{inputs.kind} got a batch without samples, which makes no microbatch; leave it "
                f"out where batches are made (batch_sampler, collate_fn, or the dataset)"
            )
        if not self.microbatch_size:
            self.microbatch_size = self._choose_size(inputs, samples.num)
        size = max(self.microbatch_size, self._smallest_size(inputs, samples.num))
        if samples.num % size == 1 < samples.num and least_samples(self._pipeline.module) > 1:
            # The last one would have no statistics.
            larger = range(size, samples.num + 1)
            size = next(more for more in larger if samples.num % more != 1)
        parts = samples.split(size)
        try:
            return self.build_microbatches(inputs, parts)
        except Exception as error:
            if size < samples.num:
                self._explain_cut_failure(error, inputs, samples, size)
            raise

    def _choose_size(self, inputs: StepInputs, total: int) -> int:
        """Return the microbatch size of the fit, by its first batch.

        ``total`` is the samples of the first batch since the fit was started or resumed: of one
        that goes on within an epoch it may be the short last one.
        """
        sizes = sorted(self._training_sizes)
        if self.first_batch.get("loader_sizes") != sizes:
            self.first_batch |= {"num_samples": total, "loader_sizes": sizes}
        of_first = self.first_batch["num_samples"]

        def cut(batch: StepInputs, count: int) -> list[Microbatch]:
            parts, sizes, are_alike = self._split(batch, of_first // count)
            num = sizes.count(sizes[0])  # a fit may resume before a short batch
            return self.build_microbatches(batch, BatchParts(parts[:num], sizes[:num], are_alike))

        is_packed = self.packs_rows(inputs.kind)
        size = of_first // self._plans.choose(inputs, of_first, is_packed, cut)
        if size < total and self._pipeline.group.is_global_zero:
            self._loss_weights.warn_of_ignored_labels(inputs.batch)
            self._loss_weights.warn_of_columns(inputs.batch, self._training_sizes)
        return size

    def _smallest_size(self, inputs: StepInputs, total: int) -> int:
        """Return the microbatch size by which a batch has no more microbatches than the plan has.

        Of packed rows each is one slice.
        """
        if self.packs_rows(inputs.kind):
            return 1
        return -(-total // self._plans.training.schedule.num_microbatches)

    def _explain_cut_failure(
        self, error: Exception, inputs: StepInputs, samples: Samples, size: int
    ) -> None:
        """Raise an error that says so where the step fails only with a microbatch."""
        try:
            self.build_microbatches(inputs, samples.split(samples.num))
        except Exception:
            return  # the first error counts, which is the caller's
        raise ValueError(
            f"{inputs.kind} fails with a microbatch, and not with the whole batch of {samples.num} "
            f"samples that was cut into {-(-samples.num // size)}: {type(error).__name__}: "
            f"{error}; set a smaller num_microbatches or a larger batch_size, or leave out a short "
            f"last batch with drop_last=True"
        ) from error

    def _warn_of_differences(self, inputs: StepInputs, microbatches: list[Microbatch]) -> None:
        """Warn where microbatches give other numbers than the whole batch.

        A trace with more samples tells what follows their number from what is as large by chance.
        """
        size, larger = microbatches[0].num_samples, None
        more = min(2 * size + 1, sum(each.num_samples for each in microbatches))
        if not self.by_user and may_mix_samples(microbatches[0].record, size):
            larger = self._record_of_first(inputs, more)
        if self._pipeline.group.is_global_zero:
            self._loss_weights.warn_of_batch_dependence(microbatches, larger, more)

    def _record_of_first(self, inputs: StepInputs, size: int) -> StepRecord | None:
        """Return the step on the first ``size`` samples; None if it fails with so many.

        No batch is cut so: the error is of no microbatch that runs.
        """
        try:
            part = self._split(inputs, size).parts[0]
            return self._pipeline.records.find_or_trace(inputs.kind, part, inputs.step, inputs.seed)
        except Exception:
            return None

    # By make_microbatches

    def _cut_first_by_user(self, inputs: StepInputs) -> list[Microbatch]:
        def cut(batch: StepInputs, count: int) -> list[Microbatch]:
            return self.build_microbatches(batch, self.make_user_microbatches(batch, count))

        count = self._plans.choose(inputs, 0, self.packs_rows(inputs.kind), cut)
        parts = self.make_user_microbatches(inputs, count)
        self.microbatch_size = -(-sum(parts.sizes) // count)
        if self._pipeline.group.is_global_zero:
            self._loss_weights.warn_of_ignored_labels(inputs.batch)
        return self.build_microbatches(inputs, parts)

    def make_user_microbatches(self, inputs: StepInputs, count: int = 0) -> BatchParts:
        """Return the batches that ``make_microbatches`` makes of one: ``count`` of them.

        0: as many as the plan has, or fewer: of batches after the first.

        Raises:
            ValueError: They are not so many, or their samples cannot be counted.
            TypeError: They are no list.
        """
        make, may_be_fewer = self._settings.make_microbatches, not count
        assert make is not None
        count = count or self._plans.training.schedule.num_microbatches
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

    # A batch of an evaluation

    def cut_evaluation_batch(self, inputs: StepInputs) -> list[Microbatch]:
        """Cut a batch into no more microbatches than the plan has.

        Predictions stay in one part unless they have a row for each sample. See
        :meth:`make_user_microbatches` too.
        """
        samples = self._structure(inputs).samples_of(inputs.batch)
        size = self._smallest_size(inputs, samples.num)
        if inputs.kind == "predict_step" and size < samples.num:
            whole = samples.split(samples.num)
            if inputs.loader not in self._cuts_predictions:
                # A number may count samples.
                counts = self.build_microbatches(inputs, whole)[0].record.result_counts
                self._cuts_predictions[inputs.loader] = counts is None or samples.num in counts
            if not self._cuts_predictions[inputs.loader]:
                return self.build_microbatches(inputs, whole)
        return self.build_microbatches(inputs, samples.split(size))

    # Of both

    def build_microbatches(self, inputs: StepInputs, parts: BatchParts) -> list[Microbatch]:
        """Make microbatches of a batch's parts, and trace the step for those with new shapes."""
        module_parts = self._pipeline.parts
        if module_parts is not None:
            module_parts.check_filled()
        arguments = self._pipeline, parts, inputs.batch, inputs.step, inputs.kind, inputs.seed
        is_first = inputs.kind not in self._traced
        self._traced.add(inputs.kind)
        with Progress.of(self._pipeline).print_if_slow("tracing") if is_first else nullcontext():
            microbatches = build_microbatches(*arguments)
        blocks = self._pipeline.called_blocks
        if blocks is not None:
            self.first_batch["blocks"] = blocks
        return microbatches

    def _split(self, inputs: StepInputs, size: int) -> BatchParts:
        return self._structure(inputs).split(inputs.batch, size)

    def _structure(self, inputs: StepInputs) -> BatchStructure:
        key = f"{inputs.kind} {inputs.loader}"
        if key not in self._structures:
            collation = self._collations.get(inputs.kind == "training_step")
            lists = self.first_batch["lists"].setdefault(key, {})
            self._structures[key] = BatchStructure(collation, lists)
        return self._structures[key]
