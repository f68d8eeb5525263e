"""The microbatches of a batch: how small they may be, and what each weighs in the batch's loss."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import cached_property, partial
from importlib import import_module
from math import isclose
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime.batch import batch_leaves, compute_microbatch_shares
from lightning_pipeoffload.runtime.cut import StepRecord, Terms
from lightning_pipeoffload.runtime.run import Pipeline
from lightning_pipeoffload.runtime.step import Microbatch
from lightning_pipeoffload.runtime.users_code import in_brackets
from lightning_pipeoffload.texts.packed_rows import IGNORED_LABEL

log = logging.getLogger(__name__)

_LABELS_LEFT_OUT = (
    "the batch has labels of -100, which losses leave out, and microbatches weigh by samples: "
    "where they count unlike numbers of tokens, the gradient is not that of the batch's mean; give "
    'the strategy microbatch_weight="tokens", or a callable of the microbatch'
)
_CLASS_WEIGHTS = (
    "the loss weighs classes{}, so it is a mean over the labels' weights, while microbatches weigh "
    "by samples: where their labels weigh unlike, the gradient is not that of the batch's mean; "
    'give the strategy microbatch_weight=lambda b: w[b["labels"]].sum(), with w these weights'
)
_PAIRS = (
    "the loss compares each sample with the others of its microbatch{}, of {} samples, where one "
    'device compares all of a batch; num_microbatches=1 with schedule="1f1b" does too, without '
    "overlap, and larger microbatches, or negatives that the batch holds for each sample, come near"
)
_REORDERED = (
    "the step puts the samples of a microbatch in another order{}, of {} samples, where one device "
    "does so with all of a batch (mixup, negatives from other rows); num_microbatches=1 with "
    'schedule="1f1b" does too, without overlap; larger microbatches, or partners that the batch '
    "holds for each sample, come near"
)
_COLUMNS = (
    "each tensor of the batch has {} columns, as many as the loader has samples in a batch, and {} "
    "rows, along which it is cut: if samples are along dimension 1, give the strategy "
    "make_microbatches=lambda batch, n: [*zip(*(t.chunk(n, 1) for t in batch))]"
)
_SUM = (
    "the loss is a sum over the samples of a microbatch{}, and the batch's loss is the mean of its "
    "{} microbatches', so that it and its gradient are as many times smaller than one device's; "
    'divide by the number of samples, as reduction="mean" does'
)
_COUNT = (
    "the loss divides by a count of the microbatch{}, of targets or of what a mask leaves, while "
    "microbatches weigh by samples: where they count unlike numbers, the gradient is not that of "
    "the batch's mean; give the strategy as microbatch_weight a callable of the microbatch that "
    "returns this count"
)
_ROWS_KEPT = (
    "{}, which the step writes{}, gets a row for each sample of a microbatch, not of the batch: a "
    "later microbatch that reads it reads those of other samples, as one device does of the batch "
    'before; for the same as there num_microbatches=1 with schedule="1f1b", without overlap'
)
_NORM = (
    "{} ({}) computes its statistics over a microbatch, of {} samples, where one device has all {} "
    'of a batch; num_microbatches=1 with schedule="1f1b" does too, without overlap, larger '
    "microbatches come near, and GroupNorm or LayerNorm depend on no other sample"
)
_OVER_A_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class MicrobatchWeights:
    """Each microbatch's share of its batch's loss, by the strategy's ``microbatch_weight``.

    Attributes:
        total: The sum of the last batch's weights, a number or a tensor.
    """

    def __init__(self, module: nn.Module, weight: str | Callable[[Any], Any]) -> None:
        self._module, self._weight = module, weight
        self._check: Callable[[], None] = lambda: None
        self.total: Any = 0

    def shares(self, parts: list[Any], sizes: list[int], are_packed: bool = False) -> Sequence[Any]:
        """Return the shares of a batch's microbatches.

        Args:
            parts: The microbatches.
            sizes: Their numbers of samples.
            are_packed: Whether they are rows of packed texts.
        """
        if self._weight == "samples":
            self.total = sum(sizes)
            return [size / self.total for size in sizes]
        self.check_previous_weights()
        shares, self.total, self._check = compute_microbatch_shares(
            self._weight_function(are_packed), parts
        )
        return shares

    def _weight_function(self, are_packed: bool) -> Callable[[Any], Any]:
        if callable(self._weight):
            return self._weight
        # Of packed rows each text's first label is -100 already, or is the one of its second token.
        return partial(count_tokens, drops_first=not are_packed and self._drops_first)

    @cached_property
    def _drops_first(self) -> bool:
        return drops_first_label(self._module)

    def check_previous_weights(self) -> None:
        """Check the last batch's weights that were on an accelerator; raises a ValueError."""
        self._check()

    def forget(self) -> None:
        """Leave the last batch unchecked, after an error."""
        self._check = lambda: None

    def warn_of_ignored_labels(self, batch: Any) -> None:
        """Warn where weights by samples may not be those of the loss."""
        if self._weight == "samples" and _has_ignored_labels(batch):
            log.warning(_LABELS_LEFT_OUT)

    def warn_of_columns(self, batch: Any, sizes: Container[int]) -> None:
        """Warn where samples may be columns of a batch, by the batch sizes of its loaders."""
        shapes = [leaf.shape for leaf in batch_leaves(batch) if isinstance(leaf, Tensor)]
        have_columns = bool(shapes) and all(
            len(shape) > 1 and shape[1] in sizes and shape[0] not in sizes for shape in shapes
        )
        if have_columns:
            log.warning(_COLUMNS.format(shapes[0][1], shapes[0][0]))

    def warn_of_batch_dependence(
        self, microbatches: Sequence[Microbatch], larger: StepRecord | None, num_larger: int
    ) -> None:
        """Warn of what microbatches compute otherwise than the whole batch, a line for each kind.

        Args:
            microbatches: The first batch's microbatches, several.
            larger: The record of the step for more samples than the first of them has, where
                :func:`may_mix_samples` holds of that one's.
            num_larger: How many.
        """
        sizes = [each.num_samples for each in microbatches]
        for name, part in _norms_over_batch(self._module):
            if part.training:
                log.warning(_NORM.format(name, type(part).__name__, sizes[0], sum(sizes)))
                break
        uses = [each.record.samples for each in microbatches]
        weights = [use.class_weights for use in uses if use.class_weights]
        if weights and self._weight == "samples":
            log.warning(_CLASS_WEIGHTS.format(in_brackets(weights[0])))
        if larger is None:
            return
        first, more = uses[0], larger.samples
        pairs = first.lines_with_pairs(sizes[0]) & more.lines_with_pairs(num_larger)
        if pairs:
            log.warning(_PAIRS.format(in_brackets(min(pairs)), sizes[0]))
        reordering = first.lines_that_reorder(sizes[0]) & more.lines_that_reorder(num_larger)
        if reordering:
            log.warning(_REORDERED.format(in_brackets(min(reordering)), sizes[0]))
        kept = first.kept_rows(sizes[0]) & more.kept_rows(num_larger)
        if kept:
            label, line = min(kept)
            log.warning(_ROWS_KEPT.format(label, in_brackets(line)))
        sums, counts = _find_sums_and_counts(
            first.loss_terms, more.loss_terms, num_larger / sizes[0]
        )
        if sums:
            log.warning(_SUM.format(in_brackets(sums[0]), len(sizes)))
        if counts and self._weight == "samples":
            log.warning(_COUNT.format(in_brackets(counts[0])))


def _find_sums_and_counts(terms: Terms, larger: Terms, ratio: float) -> tuple[list[str], list[str]]:
    """Return the lines whose part of the loss is a sum over samples, or divides by a count."""
    sums, counts = [], []
    for line, term in terms.items():
        growth = larger.get(line, term) / term if term else 1
        if isclose(growth, ratio):
            sums.append(line)
        elif not isclose(growth, 1):
            counts.append(line)
    return sums, counts


def may_mix_samples(record: StepRecord, size: int) -> bool:
    """Return whether a step may compare, sum, count or keep the samples of a microbatch."""
    uses = record.samples
    lines = uses.lines_with_pairs(size) | uses.lines_that_reorder(size)
    return bool(lines or uses.kept_rows(size)) or any(uses.loss_terms)


def count_tokens(part: Any, drops_first: bool) -> Tensor:
    """Count the labels of a microbatch that are not -100.

    Args:
        part: The microbatch, with a tensor under "labels".
        drops_first: Whether the loss leaves out the first label of each sequence.
    """
    labels = part.get("labels") if isinstance(part, Mapping) else getattr(part, "labels", None)
    if not isinstance(labels, Tensor):
        raise ValueError(
            f'microbatch_weight="tokens" counts batch["labels"] that are not {IGNORED_LABEL}, and '
            f"the batch ({type(part).__name__}) has no such tensor; give microbatch_weight a "
            f"callable of the microbatch that returns how many tokens its loss counts"
        )
    return (labels[..., 1:] if drops_first else labels).ne(IGNORED_LABEL).sum()


def drops_first_label(module: nn.Module) -> bool:
    """Whether a module has a model of transformers that predicts the next label from each."""
    if "transformers" not in sys.modules:
        return False
    names = import_module("transformers.models.auto.modeling_auto")

    # The decoders of Bart and its like take labels that are shifted already.
    encoding = names.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    models = names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    causal = {name for family, name in models if family not in encoding}
    return any(
        type(part).__name__ in causal or _is_multimodal_causal(part) for part in module.modules()
    )


def _is_multimodal_causal(part: nn.Module) -> bool:
    """Whether a model of transformers is a causal one over images or sound and text."""
    is_conditional = getattr(part, "loss_type", None) == "ForConditionalGeneration"
    return is_conditional and not getattr(part.config, "is_encoder_decoder", False)


def _has_ignored_labels(batch: Any) -> bool:
    """Return whether integers in a batch are -100; synchronizes with an accelerator."""
    tensors = (leaf for leaf in batch_leaves(batch) if isinstance(leaf, Tensor))
    return any(t.dtype == torch.int64 and bool(t.eq(IGNORED_LABEL).any()) for t in tensors)


def depends_on_microbatch_size(pipeline: Pipeline) -> bool:
    """Return whether results may depend on the microbatch size; called after the first trace.

    It does to statistics over a batch, to dropout, which is seeded for each microbatch, and to
    whatever the step draws or writes.
    """
    trained = [record for record in pipeline.records.by_key.values() if record.trained is not None]
    keeps = any(each.writes.in_place or each.writes.attributes for each in trained)
    return keeps or any(map(_depends_on_batch_size, pipeline.module.modules()))


def least_samples(module: nn.Module) -> int:
    """Return how many samples a microbatch needs: two where statistics are over a batch."""
    return 1 + any(True for _ in _norms_over_batch(module))


def _norms_over_batch(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return (named for named in module.named_modules() if isinstance(named[1], _OVER_A_BATCH))


def _depends_on_batch_size(part: nn.Module) -> bool:
    if isinstance(part, _OVER_A_BATCH):
        return True
    attributes = {**vars(part), **_dropout_rates(getattr(part, "config", None))}
    # By name: functional dropout leaves nothing else to see.
    rates = [rate for name, rate in attributes.items() if "drop" in name or name == "p"]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _dropout_rates(config: object) -> dict[str, object]:
    """Return the attributes of a Hugging Face configuration."""
    attributes = getattr(config, "__dict__", {})
    return {str(name): value for name, value in attributes.items() if "drop" in str(name)}
