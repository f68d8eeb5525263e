"""Checks on the first packed batch of each kind of step that a row's texts do not see each other.

A model that looks past a text's start trains on mixed texts, which no error would show. So the
first row of two texts runs twice, with other tokens in its first text, and only the labels of its
second one: the loss must be the same, to the bit. Attention that gets a mask of the whole row takes
memory for it in each block, which grows with the square of the row's tokens.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_pipeoffload.loop.split import Split
from lightning_pipeoffload.loop.step_calls import StepCalls, StepInputs, StepOutput
from lightning_pipeoffload.runtime import tensors_in
from lightning_pipeoffload.runtime.users_code import restoring_module
from lightning_pipeoffload.schedule import bytes_text
from lightning_pipeoffload.texts.packed_rows import IGNORED_LABEL, find_text_starts

log = logging.getLogger(__name__)

_ROUNDING = 2e-6  # of differences of losses in float32
_NUM_TRIES = 8  # each reads the batch, and waits for all ranks
_UNCHECKED = (
    "whether the texts of a packed row see each other in %s is not checked: in none of %d batches "
    "does every replica have a row of two texts with labels"
)
_ROUTERS = (
    "the loss of the experts' routers in %s is over all texts of a row, not over each alone: it "
    "is %.1e of the loss that changes with another text of the row"
)
_MASK_BYTES = 128 << 20  # of a mask that is no matter, 8192 tokens in half precision
_DENSE_MASK = (
    "attention in %s gets a dense mask of a packed row: %s in each block and microbatch, which "
    'grow with the square of its tokens; use attn_implementation="flash_attention_2", or rows of '
    "at most %d tokens"
)


class PackedRowCheck:
    """Checks once for each kind of step that texts of a row do not see each other.

    Args:
        module: The module.
        steps: Its steps.
        split: The module as it is cut.
        evaluate: Runs the forwards of a batch; all ranks call it.
    """

    def __init__(
        self,
        module: LightningModule,
        steps: StepCalls,
        split: Split,
        evaluate: Callable[[StepInputs], StepOutput],
    ) -> None:
        self._module, self._steps = module, steps
        self._split, self._evaluate = split, evaluate
        self._done: set[str] = set()
        self._num_tries: Counter[str] = Counter()

    def check_first_batch(self, inputs: StepInputs) -> None:
        """Compare a batch's steps on two texts of a row; all ranks call it with packed rows.

        Raises:
            ValueError: A text's loss depends on the text before it.
        """
        kind = inputs.kind
        # Predictions are of all texts of a row, and by no labels.
        if kind in (*self._done, "predict_step"):
            return
        rows = make_changed_rows(inputs.batch)
        self._num_tries[kind] += 1
        if not self._split.group.world.agree(rows is not None, unanimous=True):
            if self._num_tries[kind] == _NUM_TRIES:
                self._give_up(kind)
            return  # until each replica has a row of two texts
        self._done.add(kind)
        assert rows is not None
        if any(map(_has_routers, self._module.modules())):
            rows += [*map(with_other_labels, rows)]
        with restoring_module(self._module, ()), torch.no_grad(), DenseMasks() as masks:
            self._refuse_text_leaks(
                kind, [self._evaluate_scalars(replace(inputs, batch=row)) for row in rows]
            )
        self._warn_of_dense_mask(kind, masks.num_bytes, rows[0]["input_ids"].shape[-1])

    def _give_up(self, kind: str) -> None:
        self._done.add(kind)
        if self._split.group.is_global_zero:
            log.warning(_UNCHECKED, kind, _NUM_TRIES)

    def _warn_of_dense_mask(self, kind: str, num_bytes: int, num_tokens: int) -> None:
        group = self._split.group
        most = max(group.world.gather(num_bytes))
        if most > _MASK_BYTES and group.is_global_zero:
            limit = int(num_tokens * (_MASK_BYTES / most) ** 0.5)
            log.warning(_DENSE_MASK, kind, bytes_text(most), limit)

    def _evaluate_scalars(self, inputs: StepInputs) -> list[float]:
        done = self._evaluate(inputs)
        tensors = [*tensors_in(done.value), *self._steps.pop_logged(done.sizes, done.shares)]
        return [float(tensor) for tensor in tensors if tensor.numel() == 1]

    def _refuse_text_leaks(self, kind: str, numbers: list[list[float]]) -> None:
        group = self._split.group
        # A loss of routers does not depend on labels: it is no part of what other labels change.
        first, second, *others = numbers
        of_all = [_difference(first, second), _difference(first, second, *others)]
        differences = group.world.gather(of_all)
        most, without_routers = (max(values) for values in zip(*differences, strict=True))
        if not most:
            return
        if others and without_routers < _ROUNDING:
            if group.is_global_zero:
                log.warning(_ROUTERS, kind, most)
            return
        raise ValueError(
            f"in {kind} the texts of a packed row see each other: {most:.1e} of a text's loss "
            f"changes with the tokens of the text before it; the model must find where texts begin "
            f"by position_ids: give a Hugging Face model use_cache=False and no attention_mask; "
            f"one without such attention (Mamba, Bloom, OPT) trains on padded batches"
        )


class DenseMasks(TorchFunctionMode):
    """Finds the bytes of the largest mask that attention gets, in the type of the queries."""

    num_bytes = 0

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func is scaled_dot_product_attention:
            mask = keywords.get("attn_mask", args[3] if len(args) > 3 else None)
            if mask is not None:
                query = args[0] if args else keywords["query"]
                self.num_bytes = max(self.num_bytes, mask.numel() * query.itemsize)
        return func(*args, **keywords)


def _difference(
    first: list[float],
    second: list[float],
    first_by_others: list[float] | None = None,
    second_by_others: list[float] | None = None,
) -> float:
    """Return the largest relative difference of two texts' numbers.

    Of numbers by other labels, the differences to these are compared.
    """
    zeros = [0.0] * len(first)
    of_other = first_by_others or zeros, second_by_others or zeros
    numbers = zip(first, second, *of_other, strict=True)
    return max((abs((a - c) - (b - d)) / (abs(a) or 1.0) for a, b, c, d in numbers), default=0.0)


def _has_routers(part: Any) -> bool:
    return bool(getattr(getattr(part, "config", None), "output_router_logits", False))


def make_changed_rows(batch: Any) -> list[Any] | None:
    """Return two batches of a row in which only the first text differs; None: no row serves.

    Only the second text has labels.

    Raises:
        ValueError: The batch has no positions by which a model could tell texts apart.
    """
    if not isinstance(batch, Mapping) or not {"input_ids", "position_ids", "labels"} <= {*batch}:
        raise ValueError(
            "a batch of PackedRows has come to the step without its input_ids, position_ids and "
            "labels, by which the texts of a row are told apart; leave them as they are"
        )
    names = "input_ids", "position_ids", "labels"
    size, device = len(batch["input_ids"]), batch["input_ids"].device
    on_host = zip(*(batch[name].cpu().split(1) for name in names), strict=False)
    for number, (tokens, positions, labels) in enumerate(on_host):
        starts = find_text_starts(positions)
        if len(starts) < 2:
            continue
        first, second = slice(0, starts[1]), slice(*[*starts, tokens.numel()][1:3])
        kept, others = torch.full_like(labels, IGNORED_LABEL), tokens.unique()
        kept[:, second] = labels[:, second]
        if len(others) < 2 or bool(kept.eq(IGNORED_LABEL).all()):
            continue
        changed = tokens.clone()
        places = torch.searchsorted(others, tokens[:, first])
        changed[:, first] = others[(places + 1) % len(others)]
        row = {name: _row_of(value, number, size) for name, value in batch.items()}
        row["labels"] = kept.to(device)
        return [row, {**row, "input_ids": changed.to(device)}]
    return None


def with_other_labels(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with another label for each one that counts."""
    labels = row["labels"]
    return {**row, "labels": labels.where(labels.eq(IGNORED_LABEL), (labels - 1).abs())}


def _row_of(value: Any, number: int, size: int) -> Any:
    has_rows = isinstance(value, Tensor) and value.dim() and len(value) == size
    return value[number : number + 1] if has_rows else value
