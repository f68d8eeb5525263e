"""k: how long an activation travels to the host and back, over the compute of its stage.

Up to 1, all activations can be offloaded without slowing anything down (Wan et al., "PipeOffload",
ICML 2025, formula 1).
"""

from __future__ import annotations

from .actions import ScheduleError
from .costs import Costs

__all__ = ["copy_ratios", "estimated_copy_ratio", "layer_bytes", "layer_flops"]

BYTES_AFTER_RECOMPUTE = 20
"""Bytes per token and hidden unit of a layer in 16 bits, with flash attention and cheap recompute:
input of each norm 2 and 2, queries, keys and values 6, output of attention 2, input of GeLU 8."""


def layer_flops(hidden_size: int, sequence_length: int) -> float:
    """Return the operations of F, B and W of a transformer layer, for one sequence."""
    return 12.0 * sequence_length * hidden_size * (6 * hidden_size + sequence_length)


def layer_bytes(hidden_size: int, sequence_length: int) -> float:
    """Return the bytes that a transformer layer saves of one sequence, with cheap recompute."""
    return float(BYTES_AFTER_RECOMPUTE * sequence_length * hidden_size)


def estimated_copy_ratio(
    hidden_size: int, sequence_length: int, compute_rate: float, copy_rate: float
) -> float:
    """Return k of a transformer layer, before anything ran.

    It does not depend on batch size, number of layers or ranks.

    Args:
        hidden_size: Width of the layer.
        sequence_length: Tokens of a sequence.
        compute_rate: Operations per second that the device reaches.
        copy_rate: Bytes per second in one direction, when both directions take turns.

    Raises:
        ScheduleError: One of them is not positive.
    """
    sizes = {"hidden_size": hidden_size, "sequence_length": sequence_length}
    for name, value in {**sizes, "compute_rate": compute_rate, "copy_rate": copy_rate}.items():
        if not value > 0:
            raise ScheduleError(f"{name} ({value}) must be more than 0")
    compute_seconds = layer_flops(hidden_size, sequence_length) / compute_rate
    return 2 * layer_bytes(hidden_size, sequence_length) / copy_rate / compute_seconds


def copy_ratios(costs: Costs, num_stages: int) -> tuple[float, ...]:
    """Return k of every stage: infinite where copies take time and computing none."""
    names = ("offload", "reload", "forward", "backward_input", "backward_weight")
    stages = zip(*(costs.per_stage(name, num_stages) for name in names), strict=True)
    return tuple(_ratio(there + back, sum(compute)) for there, back, *compute in stages)


def _ratio(copies: float, compute: float) -> float:
    if compute:
        return copies / compute
    return float("inf") if copies else 0.0
