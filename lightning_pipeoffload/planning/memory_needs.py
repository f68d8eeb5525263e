"""The memory that each rank of a plan needs on its device and on its host, from shapes alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from lightning_pipeoffload.planning.report import join_measurements
from lightning_pipeoffload.runtime import TensorSpec
from lightning_pipeoffload.runtime.comm import assign_owners
from lightning_pipeoffload.runtime.cut import Stage, StepRecord
from lightning_pipeoffload.runtime.measure import (
    StageCosts,
    costs_of_slice,
    costs_of_stages,
    measure_saved_memory,
    shares_of_slices,
)
from lightning_pipeoffload.runtime.memory import gradient_bytes, staging_bytes
from lightning_pipeoffload.runtime.run import Pipeline
from lightning_pipeoffload.runtime.shapes import bytes_on_device
from lightning_pipeoffload.runtime.step import Microbatch
from lightning_pipeoffload.runtime.users_code import find_slots
from lightning_pipeoffload.schedule import (
    COMPUTE_TIMES,
    Action,
    Costs,
    Kind,
    Schedule,
    Slices,
    forward_only,
    lower,
    peak_host_memory,
    peak_memory,
    peak_message_memory,
)

_KEPT = ("activation", "weight_input", "weight_residue")
_MOST_OF = 0.9  # of the bytes of parameters and buffers

OPERATIONS_PER_BYTE = 2000
"""Operations in the time of a byte to a tensor rank, where no device is known.

An H100's 989 TFLOP/s over NVLink's 450 GB/s are 2,200, an A100's 312 over 300 are 1,040, and an RTX
4090's 165 over PCIe's 32 are 5,200.
"""

ON_DEVICE = ("parameters", "gradients", "optimizer", "activations", "workspace", "messages")
"""The kinds of memory on a device, by their names in the report."""


@dataclass(frozen=True)
class RankNeeds:
    """Bytes that one rank needs.

    Attributes:
        parameters: Of the parameters and buffers that its stages own.
        gradients: Of the gradients of those that train, one for each stage.
        optimizer: Of optimizer states for them.
        activations: The peak of its microbatches' activations.
        workspace: What chunks of a loss take while they are computed.
        messages: The peak of messages to and from other ranks, in evaluations too.
        offloaded: The peak of activations on the host.
        host_optimizer: Of optimizer states, masters and staging buffers on the host.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int
    messages: int
    offloaded: int
    host_optimizer: int = 0

    @property
    def host(self) -> int:
        return self.offloaded + self.host_optimizer

    @property
    def device(self) -> int:
        return sum(getattr(self, name) for name in ON_DEVICE)


class StandInTraits(NamedTuple):
    """The tensors that an optimizer steps in place of its parameters.

    Attributes:
        by_bucket: Whether it may step a part of the parameters at a time.
        has_masters: Whether they are masters in float32, which count among the states.
        on_host: Whether it steps on the host, which has the states then.
    """

    by_bucket: bool
    has_masters: bool
    on_host: bool


@dataclass(frozen=True)
class MemoryNeeds:
    """The needs of a cut module's stages, for any plan.

    Attributes:
        owned: Bytes of parameters, gradients and optimizer states of each stage, by the tensor's
            identity.
        costs: The pipeline's estimate of the costs, with memory in bytes.
        sent: Bytes of each stage's output, and of the gradient of its input.
        flops_of_one: Operations per unit of the costs' times.
        workspace: Bytes that an F or B of each stage takes and frees again; one runs at a time.
        num_optimizer_shards: The number of replicas that share out optimizer states.
        stand_ins: The tensors that the optimizer steps in place of parameters; None: it has none.
        slices: How the costs divide among slices of a sequence, where that is known.
        collectives: Bytes that F and B of each stage send to tensor ranks.
    """

    owned: Sequence[Mapping[int, tuple[int, int, int]]]
    costs: Costs
    sent: Mapping[Kind, Sequence[int]]
    flops_of_one: float
    workspace: Sequence[float]
    num_optimizer_shards: int = 1
    stand_ins: StandInTraits | None = None
    slices: Slices = Slices()
    collectives: Mapping[Kind, Sequence[float]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        pipeline: Pipeline,
        first: Microbatch,
        states: Mapping[int, int] = MappingProxyType({}),
        num_optimizer_shards: int = 1,
        recompute: str | None = None,
    ) -> MemoryNeeds:
        """Trace the first microbatch by shapes.

        Args:
            pipeline: One rank's part of a module that is cut.
            first: The first microbatch.
            states: Bytes of optimizer states, by the parameter's id.
            num_optimizer_shards: The number of replicas that share them out.
            recompute: What B computes again; None: as the pipeline's settings have it.

        Raises:
            Exception: The step does not run without values.
        """
        # As a run does, by the module's own hook, which may enter a context that its loss needs.
        first = replace(first, differentiate=getattr(pipeline.module, "backward", Tensor.backward))
        saved, num_slices = measure_saved_memory(pipeline, first, recompute), 1
        if first.record.sequence is not None:
            num_slices = pipeline.settings.num_sequence_slices
        starts = range(0, len(saved), num_slices)
        stages = [saved[start : start + num_slices] for start in starts]
        parts = [[*map(costs_of_slice, of)] for of in stages]
        wholes = [*map(StageCosts.of, parts)]
        costs = replace(
            pipeline.cut.costs,
            activation=[whole.activation for whole in wholes],
            weight_input=[whole.weight_input for whole in wholes],
            weight_residue=[whole.weight_residue for whole in wholes],
            slices=shares_of_slices(parts) if num_slices > 1 else None,
        )
        sent, unit = _sent(pipeline, first.record), pipeline.cut.segment_costs.unit
        workspace = [max(part.workspace_bytes for part in of) for of in stages]
        collectives = {
            kind: [sum(part.collective_bytes[kind] for part in of) for of in stages]
            for kind in (Kind.F, Kind.B)
        }
        owned = _owned(pipeline, states)
        return cls(
            owned, costs, sent, unit, workspace, num_optimizer_shards, collectives=collectives
        )

    @property
    def costs_with_collective_waits(self) -> Costs:
        """The costs, in which F and B wait for what they send to tensor ranks."""
        num_stages = len(self.owned)
        compute: dict[str, Any] = {
            name: [*map(sum, zip(self.costs.per_stage(name, num_stages), of, strict=True))]
            for name, of in self.collective_waits(OPERATIONS_PER_BYTE).items()
        }
        return replace(self.costs, **compute) if compute else self.costs

    def collective_waits(self, operations_per_byte: float) -> dict[str, list[float]]:
        """Return how long F and B of each stage wait for tensor ranks, in the unit of the costs.

        Empty where there are no such ranks.
        """
        if not any(map(any, self.collectives.values())):
            return {}
        times = operations_per_byte / self.flops_of_one
        kinds = {"forward": Kind.F, "backward_input": Kind.B}
        return {
            name: [times * size for size in self.collectives[kind]] for name, kind in kinds.items()
        }

    def join_into_stages(self, stages: Sequence[Stage]) -> MemoryNeeds:
        """Return the needs of stages that have several blocks.

        In these needs each block is a stage, and so is the code after the blocks.
        """
        costs = costs_of_stages(self.costs, stages)
        ends: dict[Kind, Callable[[Iterable[int]], int]] = {Kind.SEND_F: max, Kind.SEND_B: min}
        sent = {k: [self.sent[k][end(s.segments)] for s in stages] for k, end in ends.items()}
        owned = [self._tensors_of(sorted(stage.segments)) for stage in stages]
        workspace = [max(self.workspace[segment] for segment in s.segments) for s in stages]
        collectives = {
            kind: [sum(sizes[segment] for segment in s.segments) for s in stages]
            for kind, sizes in self.collectives.items()
        }
        joined = replace(
            self,
            owned=owned,
            costs=costs,
            sent=sent,
            workspace=workspace,
            collectives=collectives,
        )
        return replace(joined, slices=self._slices_of(stages, costs))

    @property
    def stage_signatures(self) -> list[Any]:
        """What tells stages apart: all that is known of each, without its tensors' identities."""
        num_stages = len(self.owned)
        columns = [
            *(self.costs.per_stage(name, num_stages) for name in (*COMPUTE_TIMES, *_KEPT)),
            *(self.sent[kind] for kind in (Kind.SEND_F, Kind.SEND_B)),
            *self.collectives.values(),
            self.workspace,
            [sorted(sizes.values()) for sizes in self.owned],
        ]
        return [*zip(*columns, strict=True)]

    def repeat_stages(self, places: Sequence[int]) -> MemoryNeeds:
        """Return the needs of more stages, each like one of these; ``places`` has its index.

        In both each block is a stage, and the code after them; times are in the mean F of blocks.
        """
        num_stages, new = len(self.owned), -1
        num_owners = Counter(key for sizes in self.owned for key in sizes)
        owned: list[Mapping[int, tuple[int, int, int]]] = []
        for index, place in enumerate(places):
            sizes = dict(self.owned[place])
            if place in places[:index]:  # its tensors are others, but for those that are shared
                for key in [key for key in sizes if num_owners[key] == 1]:
                    sizes[new] = sizes.pop(key)
                    new -= 1
            owned.append(sizes)

        def at_places(column: Sequence[Any]) -> list[Any]:
            return [column[place] for place in places]

        costs: dict[str, Any] = {
            name: at_places(self.costs.per_stage(name, num_stages))
            for name in (*COMPUTE_TIMES, *_KEPT)
        }
        unit = sum(costs["forward"][:-1]) / (len(places) - 1) or 1.0
        for name in COMPUTE_TIMES:
            costs[name] = [time / unit for time in costs[name]]
        return replace(
            self,
            owned=owned,
            flops_of_one=self.flops_of_one * unit,
            costs=replace(self.costs, **costs),
            sent={kind: at_places(sizes) for kind, sizes in self.sent.items()},
            workspace=at_places(self.workspace),
            collectives={kind: at_places(sizes) for kind, sizes in self.collectives.items()},
        )

    def _slices_of(self, stages: Sequence[Stage], joined: Costs) -> Slices:
        """Return how costs of stages divide among slices: by attention, and code after the blocks.

        In blocks that train, attention is what F has more than W. Where some do not, nothing is
        known of it.
        """
        num_segments = len(self.owned)
        sizes = [sizes for segment in self.owned for sizes in segment.values()]
        trained = sum(size for size, gradient, _ in sizes if gradient)
        trains = trained > _MOST_OF * sum(size for size, _, _ in sizes)
        weight = self.costs.per_stage("backward_weight", num_segments)
        shares: dict[str, Any] = {}
        for name in ("forward", "backward_input"):
            of_segment = self.costs.per_stage(name, num_segments)
            beyond = [max(0.0, a - b) for a, b in zip(of_segment, weight, strict=True)]
            beyond[-1] = 0.0
            of_stages = [sum(beyond[s] for s in stage.segments) * trains for stage in stages]
            shares[f"quadratic_{name}"] = _shares(of_stages, joined, name)
        for name in (*COMPUTE_TIMES, "activation", "weight_residue", "weight_input"):
            at_end = self.costs.per_stage(name, num_segments)[-1]
            of_stages = [at_end * (num_segments - 1 in stage.segments) for stage in stages]
            shares[f"end_{name}"] = _shares(of_stages, joined, name)
        return Slices(**shares)

    def with_slices_of(self, costs: Costs) -> MemoryNeeds:
        """Return these needs with the slices of a plan's costs."""
        return replace(self, costs=replace(self.costs, slices=costs.slices))

    def add_to_last_stage(self, num_bytes: int) -> MemoryNeeds:
        """Return the needs with bytes that the last stage's rank takes in addition, for metrics."""
        *others, last = self.workspace
        return replace(self, workspace=[*others, last + num_bytes])

    def scale_microbatch(self, factor: float) -> MemoryNeeds:
        """Return the needs of microbatches with ``factor`` times the samples."""
        if factor == 1:
            return self
        num_stages = len(self.owned)
        kept: dict[str, Any] = {
            n: [size * factor for size in self.costs.per_stage(n, num_stages)] for n in _KEPT
        }
        sent = {kind: [int(size * factor) for size in sizes] for kind, sizes in self.sent.items()}
        costs = replace(self.costs, **kept)
        workspace = [size * factor for size in self.workspace]
        collectives = {
            kind: [size * factor for size in sizes] for kind, sizes in self.collectives.items()
        }
        flops = self.flops_of_one * factor
        return replace(
            self,
            costs=costs,
            sent=sent,
            flops_of_one=flops,
            workspace=workspace,
            collectives=collectives,
        )

    def needs_by_rank(self, plan: Schedule) -> list[RankNeeds]:
        """Return what each rank needs for a lowered plan of these stages."""
        activations = peak_memory(plan, self.costs)
        messages = self._messages_of(plan)
        hosts = peak_host_memory(plan, self.costs)
        peaks = zip(activations, messages, hosts, strict=True)
        needs_of_ranks = []
        for rank, (peak, sent, offloaded) in enumerate(peaks):
            stages = plan.stages_of(rank)
            others = int(self._workspace_of(stages)), int(sent), int(offloaded)
            needs = (
                *self._persistent_bytes(stages),
                int(peak),
                *others,
                self._host_optimizer_bytes(stages),
            )
            needs_of_ranks.append(RankNeeds(*needs))
        return needs_of_ranks

    def _messages_of(self, plan: Schedule) -> Sequence[float]:
        evaluation = lower(forward_only(plan))
        if plan.num_sequence_slices == 1:
            return peak_message_memory(plan, self._size_of, evaluation)
        shares = (self.costs.slices or Slices()).shares(plan.num_sequence_slices)

        def size_of_slice(send: Action) -> float:
            return self._size_of(send) * shares[send.microbatch % len(shares)]

        # Evaluations run whole sequences, whose messages are whole as well.
        pairs = (
            peak_message_memory(plan, size_of_slice),
            peak_message_memory(evaluation, self._size_of),
        )
        return [*map(max, *pairs)]

    def bytes_without_activations(self, stages: Sequence[int]) -> float:
        """Return the bytes of some stages without activations and messages."""
        return sum(self._persistent_bytes(stages)) + self._workspace_of(stages)

    def least_rank_bytes(self, num_ranks: int) -> float:
        """Return the bytes without activations that one of ``num_ranks`` ranks has at least."""
        owned = self._tensors_of(range(len(self.owned))).values()
        parameters, gradients, states = (sum(s) for s in zip((0, 0, 0), *owned, strict=True))
        on_device = 0.0 if self.has_host_optimizer else states / self.num_optimizer_shards
        return (parameters + gradients + on_device) / num_ranks

    def _workspace_of(self, stages: Sequence[int]) -> float:
        return max(self.workspace[stage] for stage in stages)

    def gradient_bytes(self) -> list[int]:
        """Return the bytes of each stage's gradients."""
        return [sum(gradient for _, gradient, _ in stage.values()) for stage in self.owned]

    def optimizer_step_traffic(self) -> list[float]:
        """Return what the host's memory moves of each stage in one step of its optimizer.

        It reads gradients, reads and writes what it steps and keeps, and writes weights: 28 bytes
        for a parameter under Adam in float32, or with masters.
        """
        bytes_of_stages = []
        has_masters = self._has_masters
        for stage in self.owned:
            trained = [sizes for sizes in stage.values() if sizes[1]]
            moved = (g + 2 * states + (w if has_masters else 2 * w) for w, g, states in trained)
            bytes_of_stages.append(sum(moved) / self.num_optimizer_shards)
        return bytes_of_stages

    def snapshot_bytes(self, plan: Schedule) -> list[tuple[int, int]]:
        """Return the bytes of each rank's snapshot that may be on its device, and all others."""
        bytes_of_ranks = []
        for rank in range(plan.num_ranks):
            _, trained, states = self._owned_by(plan.stages_of(rank))
            stepped = 0 if self._has_masters else trained
            bytes_of_ranks.append(
                (stepped, states) if self.has_host_optimizer else (stepped + states, 0)
            )
        return bytes_of_ranks

    @property
    def has_host_optimizer(self) -> bool:
        """Whether the optimizer steps on the host."""
        return self.stand_ins is not None and self.stand_ins.on_host

    @property
    def _has_masters(self) -> bool:
        return self.stand_ins is not None and self.stand_ins.has_masters

    def _size_of(self, send: Action) -> int:
        return self.sent[send.kind][send.stage]

    def _persistent_bytes(self, stages: Sequence[int]) -> list[int]:
        """Sum parameters, gradients and states; of shared tensors only gradients count twice."""
        parameters, _, states = self._owned_by(stages)
        gradients = (sizes[1] for stage in stages for sizes in self.owned[stage].values())
        return [parameters, sum(gradients), 0 if self.has_host_optimizer else states]

    def _host_optimizer_bytes(self, stages: Sequence[int]) -> int:
        """Return the bytes that the optimizer takes there."""
        if self.stand_ins is None or not self.stand_ins.on_host:
            return 0
        owned = self._tensors_of(stages).values()
        pairs = [size + gradient for size, gradient, _ in owned if gradient]
        return self._owned_by(stages)[2] + staging_bytes(pairs, self.stand_ins.by_bucket)

    def _tensors_of(self, parts: Iterable[int]) -> dict[int, tuple[int, int, int]]:
        """Return the sizes of the tensors that some blocks or stages own, each once."""
        return {key: sizes for part in parts for key, sizes in self.owned[part].items()}

    def _owned_by(self, stages: Sequence[int]) -> list[int]:
        owned = self._tensors_of(stages)
        parameters, gradients, _ = (sum(s) for s in zip((0, 0, 0), *owned.values(), strict=True))
        return [parameters, gradients, self._largest_share([*owned.values()])]

    def _largest_share(self, owned: Sequence[tuple[int, int, int]]) -> int:
        """Return the states of the replica that has most of them, as replicas share them out."""
        with_states = [sizes for sizes in owned if sizes[2]]
        owners = assign_owners(
            [size for size, _, _ in with_states], [0] * self.num_optimizer_shards
        )
        shares = [0] * self.num_optimizer_shards
        for owner, (weight, gradient, states) in zip(owners, with_states, strict=True):
            shares[owner] += states + self._cast_bytes(weight, gradient)
        return max(shares)

    def _cast_bytes(self, weight: int, gradient: int) -> int:
        """Return the bytes of a gradient in float32, if a step on the device casts all at once."""
        if self.has_host_optimizer or not self._has_masters or gradient > weight:
            return 0
        assert self.stand_ins is not None
        return 0 if self.stand_ins.by_bucket else 2 * gradient


def _shares(parts: Sequence[float], whole: Costs, name: str) -> list[float]:
    costs = whole.per_stage(name, len(parts))
    pairs = zip(parts, costs, strict=True)
    return [min(1.0, part / cost) if cost else 0.0 for part, cost in pairs]


def describe_needs(needs: Sequence[RankNeeds]) -> dict[str, list[int]]:
    """Return one list for each figure, in pipeline order."""
    sums = ({"device": rank.device, "host": rank.host} for rank in needs)
    pairs = zip(needs, sums, strict=True)
    return join_measurements([{**asdict(rank), **both} for rank, both in pairs])


def add_snapshot_bytes(
    memory: dict[str, list[int]], copied: Sequence[tuple[int, int]], room: float
) -> None:
    """Add the optimizer snapshot to the needs of ranks, as of :func:`describe_needs`.

    Args:
        memory: The needs of ranks.
        copied: By rank the bytes of the snapshot that are on the device where that has room, else
            on the host, and those that are on the host.
        room: Bytes of a device that may be used.
    """
    memory["step_copies"] = [sum(copies) for copies in copied]
    for rank, (copies, on_host) in enumerate(copied):
        has_room = memory["device"][rank] + copies <= room
        memory["device" if has_room else "host"][rank] += copies
        memory["host"][rank] += on_host


def _owned(pipeline: Pipeline, states: Mapping[int, int]) -> list[dict[int, tuple[int, int, int]]]:
    owned: list[dict[int, tuple[int, int, int]]] = [{} for _ in pipeline.cut.stages]
    for slot in find_slots(pipeline.module):
        tensor = slot.tensor
        gradient = gradient_bytes(tensor) if tensor.requires_grad else 0
        sizes = bytes_on_device(slot), gradient, states.get(id(tensor), 0)
        for stage in pipeline.tensors.owners[slot.name]:
            owned[stage][pipeline.tensors.identity[slot.name]] = sizes
    return owned


def _sent(pipeline: Pipeline, record: StepRecord) -> dict[Kind, list[int]]:
    """Return the bytes that cross the cut after each stage, and those back over that before it."""
    blocks = [stage.blocks for stage in pipeline.cut.stages]
    specs: list[list[TensorSpec]] = [
        [],
        *(record.message_specs_before(b.start) for b in blocks[1:]),
        [],
    ]
    forward = [sum(spec.num_bytes for spec in cut) for cut in specs]
    backward = [sum(spec.num_bytes for spec in cut if spec.gets_gradient) for cut in specs]
    return {Kind.SEND_F: forward[1:], Kind.SEND_B: backward[:-1]}
