"""What ``microbatch_weight="tokens"`` counts: the labels that a mean over tokens is taken of."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime.microbatch import batch_leaves

_IGNORED = -100  # torch's ignore_index, and transformers'


def count_tokens(part: Any, drops_first: bool) -> Tensor:
    """Count the labels of a microbatch that are not -100.

    Args:
        part: The microbatch.
        drops_first: Whether the loss leaves out the first label of each sequence.

    Raises:
        ValueError: The microbatch has no tensor under "labels".
    """
    labels = part.get("labels") if isinstance(part, Mapping) else getattr(part, "labels", None)
    if not isinstance(labels, Tensor):
        raise ValueError(
            f'microbatch_weight="tokens" counts batch["labels"] that are not {_IGNORED}, and the '
            f"batch ({type(part).__name__}) has no such tensor; give microbatch_weight a callable "
            f"of the microbatch that returns how many tokens its loss counts"
        )
    return (labels[..., 1:] if drops_first else labels).ne(_IGNORED).sum()


def drops_first_label(module: nn.Module) -> bool:
    """Whether a module has a model of transformers that compares logits with the labels behind."""
    if "transformers" not in sys.modules:
        return False
    names = import_module("transformers.models.auto.modeling_auto")

    # The decoders of Bart and its like take labels that are shifted already.
    encoding = names.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    models = names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    causal = {name for family, name in models if family not in encoding}
    return any(type(part).__name__ in causal or _reads_images(part) for part in module.modules())


def _reads_images(part: nn.Module) -> bool:
    """Whether a model of transformers is a causal one over images or sound and text."""
    is_conditional = getattr(part, "loss_type", None) == "ForConditionalGeneration"
    return is_conditional and not getattr(part.config, "is_encoder_decoder", False)


def has_ignored_labels(batch: Any) -> bool:
    """Whether whole numbers in a batch are -100; the host waits for those on an accelerator."""
    tensors = (leaf for leaf in batch_leaves(batch) if isinstance(leaf, Tensor))
    return any(t.dtype == torch.int64 and bool(t.eq(_IGNORED).any()) for t in tensors)
