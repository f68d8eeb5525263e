"""The ratio k: how long an activation travels to the host and back, over its stage's compute.

Up to 1, all activations can be offloaded without slowing anything down (Wan et al., "PipeOffload",
ICML 2025, formula 1).
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from ..actions import ScheduleError
from ..costs import Costs

__all__ = [
    "copy_ratios",
    "estimated_copy_ratio",
    "free_share",
    "layer_bytes",
    "layer_flops",
    "with_copy_ratio",
]

_COMPUTE = ("forward", "backward_input", "backward_weight")

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
        ScheduleError: One of them is no positive number.
    """
    sizes = {"hidden_size": hidden_size, "sequence_length": sequence_length}
    for name, value in {**sizes, "compute_rate": compute_rate, "copy_rate": copy_rate}.items():
        if not isinstance(value, (int, float)) or not 0 < value < inf:
            raise ScheduleError(f"{name} ({value}) must be a number, and more than 0")
    compute_seconds = layer_flops(hidden_size, sequence_length) / compute_rate
    return 2 * layer_bytes(hidden_size, sequence_length) / copy_rate / compute_seconds


def with_copy_ratio(costs: Costs, ratio: float) -> Costs:
    """Return costs whose copies take ``ratio`` times as long as the compute of their stage.

    Args:
        costs: Costs whose copies are not known.
        ratio: The ratio k, half of it for each direction.
    """
    seconds = [getattr(costs, name) for name in _COMPUTE]
    num_stages = max((len(values) for values in seconds if isinstance(values, tuple)), default=1)
    stages = zip(*(costs.per_stage(name, num_stages) for name in _COMPUTE), strict=True)
    copies = [ratio / 2 * sum(compute) for compute in stages]
    one_way = copies if num_stages > 1 else copies[0]
    return replace(costs, offload=one_way, reload=one_way)


def copy_ratios(costs: Costs, num_stages: int) -> tuple[float, ...]:
    """Return k of every stage: infinite where copies take time and computing none."""
    stages = zip(_copies(costs, num_stages), _compute(costs, num_stages), strict=True)
    return tuple(_ratio(sum(copies), compute) for copies, compute in stages)


def free_share(costs: Costs, num_stages: int) -> float:
    """Return which share of its activations every rank can copy while it computes: 1 for all.

    By the time of the copies alone; an activation must also be away for long enough.
    """
    stages = zip(_copies(costs, num_stages), _compute(costs, num_stages), strict=True)
    return min(1 / max(1.0, _ratio(_busy(costs, *copies), compute)) for copies, compute in stages)


def _busy(costs: Costs, offload: float, reload: float) -> float:
    """Return how long the copies of one activation keep a lane or a link busy, or both."""
    of_lane = offload + reload if costs.copy_lanes == 1 else max(offload, reload)
    return max(of_lane, costs.ranks_per_link * max(offload, reload))


def _copies(costs: Costs, num_stages: int) -> list[tuple[float, float]]:
    names = ("offload", "reload")
    return list(zip(*(costs.per_stage(name, num_stages) for name in names), strict=True))


def _compute(costs: Costs, num_stages: int) -> list[float]:
    stages = zip(*(costs.per_stage(name, num_stages) for name in _COMPUTE), strict=True)
    return [sum(seconds) for seconds in stages]


def _ratio(copies: float, compute: float) -> float:
    if compute:
        return copies / compute
    return inf if copies else 0.0
