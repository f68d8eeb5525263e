"""Seconds and memory of the actions of every stage, and the ratio of copies to compute.

The ratio k is the time to copy an activation to the host and back, over the compute time of its
stage. If k is at most 1, all activations can be offloaded without a slowdown (Wan et al.,
"PipeOffload", ICML 2025, formula 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import mul
from typing import Any

from .actions import Kind, ScheduleError
from .slices import PerStage, Slices, check_fields, expand_to_stages, slice_ends

_LEAST, _MOST = 1e-100, 1e100

_MANY_TOKENS = 1 << 20

COMPUTE_TIMES = ("forward", "backward_input", "backward_weight")
"""The fields of :class:`Costs` that are seconds of F, B and W."""


@dataclass(frozen=True)
class Costs:
    """Seconds per action and memory per activation, of a stage and one microbatch.

    Each is one number for all stages, or a sequence with one number for every global stage. With
    ``v`` chunks per rank a stage is ``1/v`` of a rank. Memory is in a unit of the caller's choice.

    Attributes:
        forward: Seconds of F.
        backward_input: Seconds of B.
        backward_weight: Seconds of W; BW takes the sum of both.
        communication: P2P latency in seconds between a stage and the next one, in both directions,
            if they are on different ranks; a sequence has the latency after each stage. The sender
            does not wait.
        activation: Memory that F saves.
        weight_residue: Memory that is alive from the end of B to the end of W; None: as much as
            ``activation``.
        offload: Seconds of the copy of one activation to the host; for a part, its share of them.
        reload: Seconds of the copy back.
        weight_input: The part of ``activation`` and ``weight_residue`` that only W needs, so that
            it can stay on the host until then.
        reduce: Seconds of REDUCE of a stage, for all its microbatches together.
        step: Seconds of the optimizer's step on the host for a stage. They overlap with the last
            W's in a plan with STEP; otherwise they follow the rank's last action.
        copy_lanes: The number of copies that a device makes at a time: 1 if both directions share a
            lane, 2 if each has its own.
        slices: How they divide among slices of the sequence, where a schedule has such; None: all
            slices are equal.
    """

    forward: PerStage
    backward_input: PerStage
    backward_weight: PerStage
    communication: PerStage = 0.0
    activation: PerStage = 1.0
    weight_residue: PerStage | None = None
    offload: PerStage = 0.0
    reload: PerStage = 0.0
    weight_input: PerStage = 0.0
    reduce: PerStage = 0.0
    step: PerStage = 0.0
    copy_lanes: int = 1
    slices: Slices | None = None

    def __post_init__(self) -> None:
        if self.weight_residue is None:
            object.__setattr__(self, "weight_residue", self.activation)
        check_fields(self, _check_cost)
        if self.copy_lanes not in (1, 2):
            raise ScheduleError(f"costs.copy_lanes ({self.copy_lanes}) must be 1 or 2")

    @classmethod
    def unit(cls) -> Costs:
        """Return F = B = W = 1 second and an activation of 1, the unit of the papers' figures."""
        return cls(forward=1.0, backward_input=1.0, backward_weight=1.0)

    def per_stage(self, name: str, num_stages: int) -> tuple[float, ...]:
        """Return a cost for every stage.

        Args:
            name: A field of this class, such as ``"forward"``.

        Raises:
            ScheduleError: The cost is a sequence of another length.
        """
        return expand_to_stages(name, getattr(self, name), num_stages)

    def per_slice(self, name: str, num_stages: int, num_slices: int) -> Sequence[float]:
        """Return a cost for every slice of every stage: all slices of a stage, then of the next.

        Raises:
            ScheduleError: As by :meth:`per_stage`, or there are sizes of another number of slices.
        """
        return self.divide_among_slices(name, self.per_stage(name, num_stages), num_slices)

    def divide_among_slices(
        self, name: str, whole: Sequence[float], num_slices: int
    ) -> Sequence[float]:
        """Return the same of costs of whole microbatches, ``whole``, one for each stage."""
        if num_slices == 1:
            return whole
        return (self.slices or Slices()).divide(name, whole, num_slices)

    def seconds_by_kind(self, num_stages: int) -> dict[Kind, tuple[float, ...]]:
        """Return the seconds of F, B and W of every stage."""
        names = {Kind.F: "forward", Kind.B: "backward_input", Kind.W: "backward_weight"}
        return {kind: self.per_stage(name, num_stages) for kind, name in names.items()}

    def scale_compute_times(self, factors: Sequence[float]) -> Costs:
        """Return the same costs with each stage's F, B and W that many times as long."""
        times: dict[str, Any] = {
            name: tuple(map(mul, self.per_stage(name, len(factors)), factors))
            for name in COMPUTE_TIMES
        }
        return replace(self, **times)

    def with_balanced_slices(
        self, num_stages: int, num_slices: int, num_tokens: int = _MANY_TOKENS
    ) -> Costs:
        """Return the same costs with slices of such lengths that all cost about the same.

        Args:
            num_stages: Stages on all ranks together.
            num_slices: Slices of each sequence.
            num_tokens: Tokens of a sequence; without them cuts are between shares of one.
        """
        slices = self.slices or Slices()
        parts = [slices.parts(n, self.per_stage(n, num_stages)) for n in COMPUTE_TIMES]
        linear, quadratic = map(sum, zip(*parts, strict=True))
        ends = slice_ends(num_tokens, num_slices, linear, quadratic)
        sizes = tuple(end - start for start, end in zip((0, *ends), ends, strict=False))
        return replace(self, slices=replace(slices, sizes=sizes))

    def latencies(self, placement: Sequence[int]) -> tuple[float, ...]:
        """Return the P2P latency from every stage to the next one, 0 if both are on one rank."""
        seconds = self.per_stage("communication", len(placement))
        to = (*placement[1:], placement[-1])
        latencies = zip(seconds, placement, to, strict=True)
        return tuple(second if here != there else 0.0 for second, here, there in latencies)


def _check_cost(name: str, value: PerStage) -> None:
    if name == "slices":  # checks itself
        return
    numbers = value if isinstance(value, Sequence) else (value,)
    if not numbers or not all(isinstance(n, (int, float)) and 0 <= n < inf for n in numbers):
        raise ScheduleError(
            f"costs.{name} ({value}) must be a number from 0 on, or one for each stage"
        )
    if any(n and not _LEAST <= n <= _MOST for n in numbers):
        raise ScheduleError(
            f"costs.{name} ({value}) must be 0 or from {_LEAST:g} to {_MOST:g}, so that sums and "
            f"shares of it are numbers; use a larger or smaller unit"
        )


BYTES_AFTER_RECOMPUTE = 20
"""Bytes per token and hidden unit of a layer in 16 bits, with flash attention and cheap recompute:
input of each norm 2 and 2, queries, keys and values 6, output of attention 2, input of GeLU 8."""


def layer_train_flops(hidden_size: int, sequence_length: int) -> float:
    """Return the operations of F, B and W of a transformer layer, for one sequence."""
    return 12.0 * sequence_length * hidden_size * (6 * hidden_size + sequence_length)


def layer_bytes(hidden_size: int, sequence_length: int) -> float:
    """Return the bytes that a transformer layer saves for one sequence, with cheap recompute."""
    return float(BYTES_AFTER_RECOMPUTE * sequence_length * hidden_size)


def estimated_copy_ratio(
    hidden_size: int, sequence_length: int, compute_rate: float, copy_rate: float
) -> float:
    """Estimate k of a transformer layer from its sizes, without a measurement.

    It does not depend on batch size, number of layers or ranks.

    Args:
        hidden_size: Width of the layer.
        sequence_length: Tokens of a sequence.
        compute_rate: Operations per second that the device reaches.
        copy_rate: Bytes per second in one direction, when both directions take turns.

    Raises:
        ScheduleError: An argument is no positive number.
    """
    sizes = {"hidden_size": hidden_size, "sequence_length": sequence_length}
    for name, value in {**sizes, "compute_rate": compute_rate, "copy_rate": copy_rate}.items():
        if not isinstance(value, (int, float)) or not 0 < value < inf:
            raise ScheduleError(f"{name} ({value}) must be a number, and more than 0")
    compute_seconds = layer_train_flops(hidden_size, sequence_length) / compute_rate
    return 2 * layer_bytes(hidden_size, sequence_length) / copy_rate / compute_seconds


def with_copy_ratio(costs: Costs, ratio: float) -> Costs:
    """Return costs whose copies take ``ratio`` times as long as the compute of their stage.

    Args:
        costs: Costs whose copies are not known.
        ratio: The ratio k, half of it for each direction.
    """
    seconds = costs.forward, costs.backward_input, costs.backward_weight
    num_stages = max((len(values) for values in seconds if isinstance(values, tuple)), default=1)
    copies = [ratio / 2 * compute for compute in compute_seconds(costs, num_stages)]
    one_way = copies if num_stages > 1 else copies[0]
    return replace(costs, offload=one_way, reload=one_way)


def compute_seconds(costs: Costs, num_stages: int) -> list[float]:
    """Return the seconds of F, B and W of each stage for a microbatch."""
    return [*map(sum, zip(*costs.seconds_by_kind(num_stages).values(), strict=True))]


def copy_ratios(costs: Costs, num_stages: int) -> tuple[float, ...]:
    """Return k of every stage: infinite where copies take time and computing none."""
    stages = zip(_copies(costs, num_stages), compute_seconds(costs, num_stages), strict=True)
    return tuple(_ratio(sum(copies), compute) for copies, compute in stages)


def hideable_copy_share(costs: Costs, num_stages: int) -> float:
    """Return the share of activations that every rank can copy during its compute; 1: all.

    It considers only the time of copies; an activation must also be unused for long enough.
    """
    stages = zip(_copies(costs, num_stages), compute_seconds(costs, num_stages), strict=True)
    return min(1 / max(1.0, _ratio(_busy(costs, *copies), compute)) for copies, compute in stages)


def _busy(costs: Costs, offload: float, reload: float) -> float:
    """Return the time for which the copies of one activation occupy a lane."""
    return offload + reload if costs.copy_lanes == 1 else max(offload, reload)


def _copies(costs: Costs, num_stages: int) -> list[tuple[float, float]]:
    names = ("offload", "reload")
    return list(zip(*(costs.per_stage(name, num_stages) for name in names), strict=True))


def _ratio(copies: float, compute: float) -> float:
    if compute:
        return copies / compute
    return inf if copies else 0.0
