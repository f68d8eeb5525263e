"""One rank's stages of the user's module.

The chain of blocks is cut at the first batch, based on the record of its step. Until
:meth:`Pipeline.commit` the module stays whole on the host, so that a second kind of step (after a
sanity check, the training step) can still add a parameter to a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from lightning_pipeoffload.runtime import PATCHES
from lightning_pipeoffload.runtime.comm import PipelineGroup
from lightning_pipeoffload.runtime.compiled import BlockCompiler, splitting_regions, warn_once
from lightning_pipeoffload.runtime.cut import (
    BlockChain,
    CallsError,
    Cut,
    CutSettings,
    SegmentCosts,
    SegmentUses,
    SplitModule,
    StageMemoryLimits,
    StepRecord,
    StepRecords,
    chain_from_names,
    check_recompute_full,
    check_slices,
    check_step,
    cut,
    default_chain,
    estimate_costs,
    find_chain,
    find_segment_uses,
    impossible_cuts,
    mark_slots,
    stage_indices_running,
)
from lightning_pipeoffload.runtime.making import PartedModule
from lightning_pipeoffload.runtime.run.gradients import Gradients
from lightning_pipeoffload.runtime.sequence import attending_to_slices
from lightning_pipeoffload.runtime.shapes import (
    GradientChanges,
    pad_packed_on_shapes,
    trunc_normal_on_shapes,
)
from lightning_pipeoffload.runtime.step import (
    StageContext,
    StageGradient,
    StageRunner,
    StepWrites,
    SwappedGradients,
    patching_checkpoints,
    patching_scalar_reads,
    stage_gradients,
)
from lightning_pipeoffload.runtime.tensor_parallel import (
    ShardDraws,
    initializing_shards,
    synchronous_collectives,
)
from lightning_pipeoffload.runtime.users_code import Slot, UsersStep, find_slots
from lightning_pipeoffload.runtime.weight_grad import (
    AddProduct,
    add_product_in_float32,
    add_product_to_grad,
    mark_computed_in_b,
)
from lightning_pipeoffload.runtime.weight_grad import kernels as weight_grad_kernels

_HOOKS = (
    "the step writes attributes and registers a hook on a tensor ({}): what the hook reads of them "
    "is refused where it has changed; what it writes counts on its own stage only"
)

# Those whose steps may run: PATCHES are of all of them.
_attached: WeakSet[Pipeline] = WeakSet()


class Pipeline:
    """The stages of one rank.

    Args:
        module: The user's module; stays whole until :meth:`commit`.
        rank: This rank in the pipeline.
        settings: How to cut.
        device: The device on which the stages compute.
        parts: The module, if it was made in parts.
        group: The processes of the pipeline, for collectives; None in one process.
        before_trace: Called before a step is traced.

    Attributes:
        tensors: The parameters and buffers, and which rank has which.
        records: The records of the steps.
        gradient_changes: The changes of the gradients of remote parameters.
        gradients: Which rank has and counts which gradient; only where there is a group.
        trained: For each parameter of the module, 1 if it trains, else 0.
        left_to_b: Names of the weights whose gradient B computes.
        at_once: Names of the weights whose products B adds to gradients, in place of W.
        stage_gradients: For weights that several stages of this rank use, the gradients of all
            these stages but the first, by name.
        cut: Where the chain is cut, once a step has been traced.

    Raises:
        ValueError: The module has no chain of blocks, or not enough of them.
    """

    def __init__(
        self,
        module: nn.Module,
        rank: int,
        settings: CutSettings,
        device: torch.device,
        parts: PartedModule | None = None,
        group: PipelineGroup | None = None,
        before_trace: Callable[[], None] = lambda: None,
    ) -> None:
        self.module = module
        self._group = group
        self.rank = rank
        self.device = device
        self.stages: dict[int, StageRunner] = {}
        self.committed = False
        self._before_trace = before_trace
        is_shared = group is not None and group.num_tensor_ranks > 1
        self._shard_draws = ShardDraws(group.tensor_rank) if group and is_shared else None
        self.gradient_changes = GradientChanges()
        if group is not None:
            self.gradients = Gradients(group)
        self.settings = settings
        is_given = settings.blocks is not None or parts is not None
        chain = find_chain(module, settings.blocks) if is_given else default_chain(module)
        self._is_open = not chain.blocks  # the blocks are those that a step calls
        self._is_by_training = False
        self.trained = b""
        self.parts = parts
        self._set_chain(chain)
        if parts is not None:
            self.tensors.assign(parts.owners, find_slots(module))
            self._drop_remote()
        self.attach()

    def _set_chain(self, chain: BlockChain) -> None:
        self.chain = chain
        self.compiler = BlockCompiler(self.module, chain.blocks, self.settings.compile)
        self.records = StepRecords(
            self.module, chain, self.device, self._before_trace, self.settings.derive_lengths
        )
        self._forget_cut()

    def _replace_chain(self, names: list[str] | None) -> None:
        self.chain.release()
        self.compiler.undo_compilation()  # or its blocks seem to be compiled by the user
        module = self.module
        try:
            self._set_chain(
                find_chain(module) if names is None else chain_from_names(module, names)
            )
        finally:
            self.compiler.enable_compilation()
            self.chain.intercept()

    def _choose_chain(self, kind: str, part: Any, step: UsersStep, seed: int) -> None:
        """Choose the blocks by the calls of the step: anew in training, whatever ran before.

        Raises:
            ValueError: The step cannot be cut.
        """
        error: ValueError | None = None
        self.compiler.undo_compilation()
        for names in (*self.records.find_chains(part, step, seed), None):
            try:
                self._replace_chain(names)
                self.records.find_or_trace(kind, part, step, seed)
            except ValueError as refused:
                error = error or refused
            else:
                break
        else:
            assert error is not None
            raise error
        self._use_blocks(self.settings.agree(self.chain.names))
        self._is_by_training = torch.is_grad_enabled()

    def _use_blocks(self, names: list[str]) -> None:
        if names != self.chain.names:
            self._replace_chain(names)

    def use_saved_blocks(self, names: list[str]) -> None:
        """Cut at the blocks that a fit was saved with, if the module still has them."""
        is_open = self._is_open and not self.is_split
        if is_open and set(names) <= dict(self.module.named_modules()).keys():
            self._use_blocks(names)
            self._is_by_training = True

    @property
    def _must_choose_blocks(self) -> bool:
        is_chosen = self._is_by_training if torch.is_grad_enabled() else self.chain.blocks
        return self._is_open and not self.is_split and not is_chosen

    @property
    def called_blocks(self) -> list[str] | None:
        """The blocks that were chosen by the calls of a training step; None: not so chosen."""
        return self.chain.names if self._is_by_training else None

    def _forget_cut(self) -> None:
        ranks = self.settings.stage_ranks
        self.tensors = SplitModule(self.module, self.chain, ranks, self.rank, self.device)
        self._writes = StepWrites(self.module, self.chain, self.tensors)
        self.records.prepare_new_cut(len(ranks))
        self._assigned: WeakSet[StepRecord] = WeakSet()  # whose tensors have their stages
        self.stages.clear()
        self._uses = SegmentUses(self.chain, self.tensors.trainable)
        if self.chain.blocks:  # an impossible split is refused here, before anything runs
            split = "even" if self.settings.split == "auto" else self.settings.split
            cut(self.chain, SegmentCosts((), (), (), ()), ranks, split)
        self.left_to_b: set[str] = set()
        self.at_once: set[str] = set()
        self.stage_gradients: dict[str, StageGradient] = {}
        self._mark_parameters(self.tensors.slots)  # some may have replaced shapes

    def prepare_new_cut(self, rank: int, settings: CutSettings) -> None:
        """Cut the module again at the next batch, with other settings but the same blocks.

        The records stay: neither recomputation nor stages change them.

        Args:
            rank: This rank in the pipeline, which may differ from before.
            settings: How to cut.
        """
        assert not self.is_split  # every rank still has the whole module
        self.rank, self.settings = rank, settings
        self._forget_cut()

    def _mark_parameters(self, slots: list[Slot]) -> None:
        for parameter in self.module.parameters():
            weight_grad_kernels.mark_deferrable(parameter)
            mark_computed_in_b(parameter, False)  # of another cut
        mark_slots(slots, self.chain)

    @property
    def group(self) -> PipelineGroup:
        """The processes over which the module is cut."""
        assert self._group is not None
        return self._group

    @property
    def is_split(self) -> bool:
        """Whether remote tensors of the module are shapes."""
        return self.tensors.is_split

    @property
    def is_in_step(self) -> bool:
        """Whether the user's step is running or traced."""
        return self.chain.is_running

    def find_record_and_cut(self, kind: str, part: Any, step: UsersStep, seed: int) -> StepRecord:
        """Return the record of a step for a microbatch; cut the module for it if it is new.

        Args:
            kind: The kind of the step, such as "training_step".
            part: The microbatch.
            step: The user's step.
            seed: The seed of the microbatch.

        Raises:
            ValueError: The step cannot be cut at its blocks; a hook sees part of a gradient.
        """
        record = self._find_record(kind, part, step, seed)
        if record not in self._assigned:
            self._use_record(record)
            self._assigned.add(record)
        if self._num_slices > 1 and record.sequence is None:
            check_slices(record, self.chain, self.module, bool(self.settings.compile))
            record = self.records.add_sequence_dims(record, part, step, seed)
            self._assigned.add(record)
        return record

    @property
    def _num_slices(self) -> int:
        return self.settings.num_sequence_slices if torch.is_grad_enabled() else 1

    def num_slices_for(self, records: Sequence[StepRecord]) -> int:
        """Return in how many slices the blocks run for microbatches with these records.

        Each slice has two tokens at least, so short sequences have fewer. Evaluations run whole.
        """
        if self._num_slices == 1:
            return 1
        return min(self._num_slices, *(record.most_slices for record in records))

    def _find_record(self, kind: str, part: Any, step: UsersStep, seed: int) -> StepRecord:
        try:
            if self._must_choose_blocks:
                self._choose_chain(kind, part, step, seed)
            return self.records.find_or_trace(kind, part, step, seed)
        except CallsError as error:
            proposal = self.records.describe_other_blocks(part, step, seed)
            raise ValueError(f"{error}{proposal}") from None

    def commit(self) -> None:
        """Replace remote tensors with shapes; the cut is fixed from now on."""
        self.committed = True
        self._drop_remote()

    def _drop_remote(self) -> None:
        self.tensors.drop_remote(self.gradient_changes, self.settings.ranks_for_errors)

    def retrace_if_frozen(self) -> None:
        """Trace the steps again if a hook has frozen or unfrozen parameters of any stage."""
        trained = bytes([parameter.requires_grad for parameter in self.tensors.parameters])
        if trained != self.trained:
            self.trained = trained
            self.records.forget()
            if self.stages:
                self.tensors.follow_requires_grad()
            for stage in self.stages.values():
                stage.clear_measurements()

    @property
    def weight_flops(self) -> int:
        """Floating-point operations of this rank's W for the first training microbatch."""
        segments = {s for i in self.tensors.local_stages for s in self.cut.stages[i].segments}
        return self.records.weight_flops(segments)

    def attach(self) -> None:
        """Intercept the blocks' calls and weight gradients."""
        self.tensors.restore_shapes()
        self.compiler.enable_compilation()
        self.chain.intercept()
        if self.stages:
            self.tensors.move()
        PATCHES.enter(splitting_regions)
        PATCHES.enter(weight_grad_kernels.deferring_kernels, self.device.type)
        if self.settings.num_sequence_slices > 1:
            PATCHES.enter(attending_to_slices, self.device.type)
        PATCHES.enter(patching_checkpoints)
        PATCHES.enter(trunc_normal_on_shapes)
        PATCHES.enter(pad_packed_on_shapes)
        if self._group is not None and self._group.num_tensor_ranks > 1:
            PATCHES.enter(synchronous_collectives, self.device)
            PATCHES.enter(initializing_shards)
        _attached.add(self)

    def detach(self) -> None:
        """Restore the module, except for its remote tensors."""
        self.chain.release()
        self.compiler.undo_compilation()
        self.tensors.make_loadable()
        _attached.discard(self)
        if not _attached:
            PATCHES.close()

    def _use_record(self, record: StepRecord) -> None:
        """Assign to stages the tensors that a new record uses; refuse a step that cannot be cut."""
        if not self.committed:
            self._add_record(record)
        self._writes.add_traced_writes(record, self.cut.stages)
        if self._shard_draws is not None:
            self._shard_draws.register_drawing_modules(
                record.draws.modules, self.chain.blocks, self.settings.compile
            )
        self._mark_weights_for_b(record)
        if self.settings.head_weight_grad == "B":
            self._mark_head_for_b(record)
        if record.reads.common and len(self.tensors.local_stages) > 1:
            PATCHES.enter(patching_scalar_reads)
        if record.hooks.line and self._writes.is_by_users and not self.rank:
            warn_once(_HOOKS.format(record.hooks.line))
        if self.settings.recompute == "full" and torch.is_grad_enabled():
            check_recompute_full(record, self.chain)
        if len(self.cut.stages) > 1:
            check_step(record, self.chain, self.cut.stages, self.tensors.owning_stages)

    def _mark_weights_for_b(self, record: StepRecord) -> None:
        """Mark weights whose gradient B computes: W is short, or some uses cannot wait for W.

        A deferred gradient keeps inputs and output gradients in memory: for adapters, those of the
        frozen base. Mixed uses would change the order of the sum.
        """
        for name, segments in record.segments.items():
            if all(map(record.work.has_short_weight_grad, segments)):
                self.left_to_b.update(self.tensors.aliases(name))
        for stage in (self.cut.stages[index] for index in self.tensors.local_stages):
            for name, uses in record.weight_uses.items():
                kinds = {could_wait for segment, could_wait in uses if segment in stage.segments}
                if len(kinds) > 1:
                    self.left_to_b.update(self.tensors.aliases(name))
        for name, tensor in self.tensors.local_tensors().items():
            if name in self.left_to_b:
                weight_grad_kernels.mark_deferrable(tensor, waits=False)

    def _mark_head_for_b(self, record: StepRecord) -> None:
        """Mark the weights used after the blocks: the last stage's B adds their gradients."""
        last = len(self.chain)
        for name, segments in record.segments.items():
            if last in segments:
                self.at_once.update(self.tensors.aliases(name))
        for name, tensor in self.tensors.local_tensors().items():
            if name in self.at_once:
                mark_computed_in_b(tensor)

    @torch.inference_mode(False)  # a validation may run before training
    def _add_record(self, record: StepRecord) -> None:
        """Cut by the first record; add to stages the tensors that a later record uses there."""
        slots = find_slots(self.module)
        self.tensors.refuse_added(slots)
        if not self._uses.segments:
            self._cut(slots, record)
        if self._uses.add_record(slots, record):
            self._assign(slots)

    def _cut(self, slots: list[Slot], record: StepRecord) -> None:
        costs = estimate_costs(slots, self.chain, record, self.settings.head_weight_grad)
        together = record.calls.inseparable
        impossible = self._impossible_cuts(slots, record) | together
        costs = self.settings.agree(replace(costs, impossible=impossible, inseparable=together))
        ranks, split, slowness = (
            self.settings.stage_ranks,
            self.settings.split,
            self.settings.slowness,
        )
        memory_limits = StageMemoryLimits.of_parameters(costs.parameters, self.settings.memory)
        stages = cut(self.chain, costs, ranks, split, slowness, memory_limits)
        self.cut = Cut(self.chain, stages, costs, slowness)

    def _impossible_cuts(self, slots: list[Slot], record: StepRecord) -> frozenset[int]:
        written = record.writes.weights  # for nothing else does it matter which segments need what
        needed = find_segment_uses(slots, self.chain, record) if written else {}
        aliases = self.tensors.aliases
        return impossible_cuts(
            record, self.chain, lambda name: set().union(*(needed[n] for n in aliases(name)))
        )

    def _assign(self, slots: list[Slot]) -> None:
        owners = {
            name: stage_indices_running(self.cut.stages, segments)
            for name, segments in self._uses.segments.items()
        }
        if self.parts is not None:
            self.parts.send_to_new_owners(owners, self.tensors, slots)
            self._mark_parameters(slots)
        self.tensors.assign(owners, slots)
        self.tensors.move()
        self.stage_gradients = stage_gradients(self.tensors.parameters_with_local_stages())
        for index in self.tensors.local_stages:
            gradients = [each for each in self.stage_gradients.values() if each.stage == index]
            context = StageContext(
                self.cut.stages[index], len(self.cut.stages), self.chain, self.tensors,
                self._writes, SwappedGradients(gradients), self.records.generators,
                self.records.kernels, self.settings.recompute, self._add_product,
                self.settings.head_weight_grad == "B",
            )  # fmt: skip
            self.stages[index] = StageRunner(context)

    @property
    def _add_product(self) -> AddProduct:
        is_fused = self.settings.gradient_accumulation_fusion
        return add_product_in_float32 if is_fused else add_product_to_grad

    def sum_stage_gradients(self) -> None:
        """Add up the gradients of each weight that several stages of this rank use."""
        for gradient in self.stage_gradients.values():
            gradient.add()

    def segments_of_shared_parameters(self) -> list[frozenset[int]]:
        """List the segments of each parameter that several segments use."""
        by_parameter: dict[int, frozenset[int]] = {}
        for name, segments in self._uses.segments.items():
            if name in self.tensors.trainable:
                key = self.tensors.identity[name]  # of tied weights it is the same
                by_parameter[key] = by_parameter.get(key, frozenset()) | segments
        return [segments for segments in by_parameter.values() if len(segments) > 1]

    def modules_outside_blocks(self, segment: int) -> list[str]:
        """List the modules outside of the blocks whose parameters only one segment uses."""
        names = {
            name.rpartition(".")[0]: None
            for name, segments in self._uses.segments.items()
            if name in self.tensors.trainable
            and segments == {segment}
            and self.chain.enclosing_block(name) is None
        }
        return [name for name in names if name]
