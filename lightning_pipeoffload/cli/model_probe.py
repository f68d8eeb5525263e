"""A module of shapes and one batch of its data, cut as a run would, for what ``conf`` describes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import OmegaConf
from torch import Tensor, nn

from lightning_pipeoffload.cli.configuration import build
from lightning_pipeoffload.loop import StepCalls
from lightning_pipeoffload.optimizers import (
    estimate_state_bytes,
    may_step_by_bucket,
    refuse_stand_ins,
)
from lightning_pipeoffload.planning.memory_needs import MemoryNeeds
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.runtime import leaves_of
from lightning_pipeoffload.runtime.batch import batch_size
from lightning_pipeoffload.runtime.cut import (
    NO_MEMORY_LIMITS,
    BlockChain,
    CutSettings,
    SegmentCosts,
    StageMemoryLimits,
    check_recompute_full,
    classify_by_structure,
    cut,
)
from lightning_pipeoffload.runtime.device import Devices
from lightning_pipeoffload.runtime.making import (
    chain_and_costs_by_size,
    make_blueprint,
    making_parameter_shapes,
)
from lightning_pipeoffload.runtime.measure import move_head_w_to_b
from lightning_pipeoffload.runtime.run import Pipeline, split_into_microbatches
from lightning_pipeoffload.runtime.shapes import RemoteTensor
from lightning_pipeoffload.runtime.step import Microbatch
from lightning_pipeoffload.runtime.tensor_parallel import (
    fake_tensor_mesh,
    sharding_layers,
    sharding_without_scatter,
)
from lightning_pipeoffload.runtime.users_code import find_slots
from lightning_pipeoffload.schedule import ScheduleError, compute_seconds

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from torch.optim import Optimizer

_CPU = torch.device("cpu")
SEED = 0
# Settings of a trainer that trains nothing.
_QUIET = {
    "accelerator": "cpu", "devices": 1, "strategy": "auto", "logger": False, "callbacks": None,
    "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    "default_root_dir": None, "barebones": False,
}  # fmt: skip


class ModelProbe:
    """A model of shapes; returns the needs of its stages for plans.

    Args:
        config: A configuration with ``model``, ``data`` and ``trainer`` of conf/train.yaml.
        like: The probe of the same model with another number of tensor ranks. Of blocks that were
            alike there, and are made alike here, only a few are traced.
        devices: The devices that stages are cut for; None: they are alike.

    Attributes:
        precision: The trainer's precision.
        recomputes: Values of ``recompute`` that a trace of all blocks measures, next to its own.

    Raises:
        ValueError: One of them cannot be built.
    """

    def __init__(
        self,
        config: DictConfig,
        like: ModelProbe | None = None,
        devices: Devices | None = None,
    ) -> None:
        self._devices = devices
        seed_everything(SEED, verbose=False)
        asked = str((config.get("trainer") or {}).get("precision"))
        # Lightning has no float16 with autocast on the CPU; bfloat16 has the same shapes.
        alike = {"precision": "bf16-mixed"} if asked in ("16", "16-mixed") else {}
        with _quiet_lightning():
            self._trainer: Trainer = build(config, "trainer", **_QUIET, **alike)
        self._precision = self._trainer.precision_plugin
        self.precision = "16-mixed" if alike else str(self._trainer.precision)
        self._config = config
        size = config.get("tensor_parallel_size", 1)
        self._mesh = fake_tensor_mesh(size) if size > 1 else None
        self._like = like
        self._flops_of_slice = 0, 0  # of the last trace: of a slice, and how many there are
        with self._making_shapes():
            self._module: LightningModule = build(self._config, "model")
        self._module.trainer = self._trainer
        # Not later: errors of the user's code are no reasons against one plan.
        self._is_in_parts: bool = like._is_in_parts if like else self._ranks_make_parts()
        if self._mesh is not None or is_overridden("configure_model", self._module):
            with self._making_shapes():
                self._configure()
        self._data: LightningDataModule = build(config, "data")
        self._data.trainer = self._trainer
        self._needs: dict[Any, MemoryNeeds] = {}
        self._chains: dict[str, BlockChain] = {}
        self._blocks: dict[Any, tuple[MemoryNeeds, list[int]] | None] = {}
        self._own_cuts: dict[Any, tuple[Sequence[str], Sequence[int]]] = {}  # see _with_run_cut
        self._sizes: dict[str, tuple[BlockChain, SegmentCosts]] = {}
        self.recomputes: Sequence[str] = ()

    def _ranks_make_parts(self) -> bool:
        """Return whether ranks of a run make their own parts, whose cut goes by sizes."""
        if not is_overridden("configure_model", self._module):
            return False
        strategy: Any = OmegaConf.to_container(self._config.strategy, resolve=True)
        with self._making_shapes():
            blueprint = make_blueprint(
                self._module, self._configure, (0,), strategy.get("blocks"), "even"
            )
        return blueprint is not None

    def _configure(self) -> None:
        try:
            if self._mesh is None:
                self._module.configure_model()
                return
            self._module._device_mesh = self._mesh  # private: as Lightning sets it
            with (
                sharding_layers(self._module, self._mesh),
                sharding_without_scatter(have_equal_values=True),
            ):
                self._module.configure_model()
        except OSError as error:  # a folder that is not there, or a name that no hub has
            given = [f"model.{name}={value}" for name, value in self._config.model.items()]
            raise ValueError(
                f"configure_model cannot read what it needs ({' '.join(given)}): "
                f"{' '.join(str(error).split())}"
            ) from error

    @contextmanager
    def _making_shapes(self) -> Iterator[None]:
        with making_parameter_shapes(), self._precision.module_init_context():
            yield

    @cached_property
    def _batch(self) -> Any:
        """The first batch of the data, as a step gets it."""
        self._data.prepare_data()
        self._data.setup("fit")
        batch = next(iter(self._data.train_dataloader()))
        batch = self._hook("on_before_batch_transfer")(batch, 0)
        return self._precision.convert_input(self._hook("on_after_batch_transfer")(batch, 0))

    def _hook(self, name: str) -> Any:
        owner = self._data if is_overridden(name, self._data) else self._module
        return getattr(owner, name)

    @property
    def batch_size(self) -> int:
        return batch_size(self._batch)

    @property
    def num_tokens(self) -> int | None:
        """Tokens of the batch: its ``input_ids``, or its first whole numbers with two dimensions.

        None: it has none.
        """
        leaves = [*leaves_of(self._batch)]
        if isinstance(self._batch, Mapping) and isinstance(self._batch.get("input_ids"), Tensor):
            leaves = [self._batch["input_ids"]]
        whole = (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim == 2)
        return next((leaf.numel() for leaf in whole if not leaf.is_floating_point()), None)

    @property
    def num_tokens_of_sequence(self) -> int | None:
        """Tokens of each sequence of the batch; None: it has none."""
        return None if self.num_tokens is None else self.num_tokens // self.batch_size

    @property
    def batch_flops(self) -> int:
        """Operations of training with the batch, forward and backward, without recomputation.

        They are those of the step that was traced last.
        """
        flops, num_microbatches = self._flops_of_slice
        return flops * num_microbatches

    def needs_of(
        self, placement: tuple[int, ...], num_microbatches: int, settings: PipelineSettings
    ) -> MemoryNeeds:
        """Return what the stages of a plan need, by the rank of every stage.

        Raises:
            ValueError: The model cannot be cut so.
        """
        varied = settings.recompute, settings.head_weight_grad, settings.master_weights
        key = placement, num_microbatches, *varied
        if key not in self._needs:
            self._needs[key] = self._trace(placement, num_microbatches, settings)
        return self._needs[key]

    def joined_needs(
        self,
        placement: tuple[int, ...],
        num_microbatches: int,
        settings: PipelineSettings,
        kept: Sequence[int] = (),
    ) -> MemoryNeeds:
        """Return what :meth:`needs_of` does, joined from the needs of every segment as a stage.

        The model is traced once for all placements. A tensor that several blocks save is counted
        for each of them, so that a stage may appear a little larger than it is. ``kept`` is of how
        many microbatches the cut has to fit each stage's activations; (): of any.
        """
        settings = self._with_run_cut(placement, settings)
        chain = self._find_chain(settings)
        needs_and_sizes = self._needs_of_blocks(chain, num_microbatches, settings)
        if needs_and_sizes is None:  # the step cannot be cut between all of its blocks
            return self.needs_of(placement, num_microbatches, settings)
        needs, sizes = needs_and_sizes
        forward, for_input, for_weight = needs.costs.seconds_by_kind(len(chain) + 1).values()
        costs = SegmentCosts(forward, for_input, for_weight, tuple(sizes))
        memory_limits = self._stage_memory_limits(needs, placement, kept)
        stages = cut(
            chain, costs, placement, settings.split, self._slowness(placement), memory_limits
        )
        if settings.head_weight_grad == "B":
            needs = replace(needs, costs=move_head_w_to_b(needs.costs, len(chain) + 1))
        return needs.join_into_stages(stages)

    def _slowness(self, placement: Sequence[int]) -> Sequence[float]:
        return () if self._devices is None else self._devices.slowness_per_stage(placement)

    def _memory(self, placement: Sequence[int]) -> Sequence[float]:
        return () if self._devices is None else self._devices.memory_per_stage(placement)

    def _stage_memory_limits(
        self, needs: MemoryNeeds, placement: Sequence[int], kept: Sequence[int]
    ) -> StageMemoryLimits:
        """Return the memory of stages, for the needs of segments."""
        limits = self._memory(placement)
        if not kept or not limits:
            return NO_MEMORY_LIMITS
        sizes = needs.costs.per_stage("activation", len(needs.owned))
        owned = [sum(map(sum, segment.values())) for segment in needs.owned]
        return StageMemoryLimits(sizes, limits, kept, owned)

    def _needs_of_blocks(
        self, chain: BlockChain, num_microbatches: int, settings: PipelineSettings
    ) -> tuple[MemoryNeeds, list[int]] | None:
        """Return the needs with each block as a stage, and numbers of parameters; None: no cut."""

        def key(recompute: str) -> Any:
            return num_microbatches, recompute, settings.master_weights

        if key(settings.recompute) not in self._blocks:
            alone: dict[str, Any] = {"blocks": chain.names, "split": [1] * len(chain) + [0]}
            each = replace(settings, head_weight_grad="W", **alone)
            wanted = dict.fromkeys((settings.recompute, *self.recomputes))
            self._blocks |= dict.fromkeys(map(key, wanted))
            for recompute, traced in self._trace_blocks(chain, num_microbatches, each, wanted):
                self._blocks[key(recompute)] = traced
        return self._blocks[key(settings.recompute)]

    def _trace_blocks(
        self,
        chain: BlockChain,
        num_microbatches: int,
        settings: PipelineSettings,
        recomputes: Iterable[str],
    ) -> list[tuple[str, tuple[MemoryNeeds, list[int]]]]:
        """Return the needs with each block as a stage, as far as the step can be traced so."""
        found: list[tuple[str, tuple[MemoryNeeds, list[int]]]] = []
        places = self._representative_per_block(chain)
        container = container_of(self._module, chain.names) if places else None
        if container is not None:
            names = chain.names[: max(places) + 1]
            few: Any = {"blocks": names, "split": [1] * len(names) + [0]}
            sizes = (*range(len(names) + 1),), num_microbatches, replace(settings, **few)
            # The user's code may count its blocks.
            with suppress(Exception), leaving_out_blocks(container, places):
                traces = self._traces(*sizes, recomputes)
                found += self._repeated(traces, [*places, len(names)])
        if not found:
            whole = (*range(len(chain) + 1),), num_microbatches, settings
            with suppress(ValueError):
                for recompute, needs in self._traces(*whole, recomputes):
                    found.append((recompute, (needs, self._num_parameters)))
        return found

    def _representative_per_block(self, chain: BlockChain) -> list[int]:
        """Return where each block has its like if few are traced; empty: all of them are."""
        rows = [] if self._like is None else self._like._rows_of_blocks(len(chain))
        if not rows:
            return []
        places = representative_per_block([*zip(rows, classify_by_structure(chain), strict=True)])
        return places if max(places) + 1 < len(chain) else []

    def _repeated(
        self, traces: Iterable[tuple[str, MemoryNeeds]], places: Sequence[int]
    ) -> Iterator[tuple[str, tuple[MemoryNeeds, list[int]]]]:
        """Yield the needs of all blocks from those of a few; ``places`` has each one's like."""
        flops = 0
        for recompute, needs in traces:
            num_parameters = [self._num_parameters[place] for place in places]
            if not flops:
                work = compute_seconds(needs.costs, len(needs.owned))
                left_out = sum(work[place] for place in places) - sum(work)
                flops, count = self._flops_of_slice
                self._flops_of_slice = flops + round(left_out * needs.flops_of_one), count
            yield recompute, (needs.repeat_stages(places), num_parameters)

    def _rows_of_blocks(self, num_blocks: int) -> list[Any]:
        """Return what each block was found to need; empty: they have not been traced one by one."""
        found = [needs for needs, _ in filter(None, self._blocks.values())]
        if not found or any(len(needs.owned) != num_blocks + 1 for needs in found):
            return []
        return [*zip(*(needs.stage_signatures for needs in found), strict=True)][:num_blocks]

    def _find_chain(self, settings: PipelineSettings) -> BlockChain:
        """Return the blocks, for which the step may have to be traced."""
        key = str(settings.blocks)
        if key not in self._chains:
            with self._temporary_pipeline(CutSettings((0,), settings.blocks)) as pipeline:
                if not len(pipeline.chain):
                    self._trace_first_microbatch(pipeline, self.batch_size)
                self._chains[key] = pipeline.chain
        return self._chains[key]

    def _trace(
        self, placement: tuple[int, ...], num_microbatches: int, settings: PipelineSettings
    ) -> MemoryNeeds:
        wanted = [settings.recompute]
        ((_, needs),) = self._traces(placement, num_microbatches, settings, wanted)
        return needs

    def _traces(
        self,
        placement: tuple[int, ...],
        num_microbatches: int,
        settings: PipelineSettings,
        recomputes: Iterable[str],
    ) -> Iterator[tuple[str, MemoryNeeds]]:
        """Trace a step once, and yield the needs with each value of ``recompute``."""
        settings = self._with_run_cut(placement, settings)
        arguments = placement, settings.blocks, settings.split, settings.recompute
        head = settings.head_weight_grad_choices[0]
        with self._temporary_pipeline(CutSettings(*arguments, head_weight_grad=head)) as pipeline:
            size = self.batch_size // num_microbatches
            if not size:
                raise ScheduleError(
                    f"num_microbatches ({num_microbatches}) is more than the {self.batch_size} "
                    f"samples of a batch; use fewer, or a larger data.batch_size"
                )
            first = self._trace_first_microbatch(pipeline, size)
            self._num_parameters = pipeline.cut.num_parameters
            self._flops_of_slice = first.record.work.training_flops, num_microbatches
            states = self.optimizer_state_bytes(settings.master_weights)
            for recompute in recomputes:
                if recompute == "full":
                    check_recompute_full(first.record, pipeline.chain)
                yield recompute, MemoryNeeds.of(pipeline, first, states, recompute=recompute)

    @contextmanager
    def _temporary_pipeline(self, cut_settings: CutSettings) -> Iterator[Pipeline]:
        _move_shapes_to_host(self._module)
        self._module = self._precision.convert_module(self._module)
        pipeline = Pipeline(self._module, 0, cut_settings, _CPU)
        try:
            with self._precision.train_step_context():
                yield pipeline
        except ValueError:
            raise
        except Exception as error:  # the user's own code, which may need values
            raise ValueError(
                f"the step of {type(self._module).__name__} does not run without values: "
                f"{type(error).__name__}: {error}; train a few steps, whose report has what they "
                f"took"
            ) from error
        finally:
            pipeline.detach()

    def _trace_first_microbatch(self, pipeline: Pipeline, size: int) -> Microbatch:
        inputs = StepCalls(self._module, SEED).inputs("training_step", (self._batch, 0), {})
        slices = split_into_microbatches(
            pipeline, inputs.batch, size, inputs.step, inputs.kind, inputs.seed
        )
        return slices[0]

    def _with_run_cut(
        self, placement: tuple[int, ...], settings: PipelineSettings
    ) -> PipelineSettings:
        """Return settings with the cut of a run that makes the layers of ``configure_model``."""
        if not self._is_in_parts:
            return settings
        key = placement, str(settings.blocks), str(settings.split)
        if key not in self._own_cuts:
            chain, costs = self._sizes_of_blocks(settings.blocks)
            slowness: Sequence[float] = ()
            memory_limits = NO_MEMORY_LIMITS
            if isinstance(settings.split, str):  # counts that are given are of any devices
                slowness = self._slowness(placement)
                memory_limits = StageMemoryLimits.of_parameters(
                    costs.parameters, self._memory(placement)
                )
            stages = cut(chain, costs, placement, settings.split, slowness, memory_limits)
            self._own_cuts[key] = chain.names, [len(stage.blocks) for stage in stages]
        blocks, split = self._own_cuts[key]
        return replace(settings, blocks=blocks, split=split)

    def _sizes_of_blocks(
        self, blocks: str | Sequence[str] | None
    ) -> tuple[BlockChain, SegmentCosts]:
        """Return the blocks of a module in parts, and their costs by sizes."""
        key = str(blocks)
        if key not in self._sizes:
            chain, _, costs = chain_and_costs_by_size(self._module, blocks)
            self._sizes[key] = chain, costs
        return self._sizes[key]

    def optimizer_state_bytes(self, master_weights: str | None) -> dict[int, int]:
        """Return the bytes of optimizer state of each parameter, masters among it."""
        return estimate_state_bytes(self._optimizers, master_weights is not None)

    @property
    def _optimizers(self) -> list[Optimizer]:
        with _no_advice():
            # Private: what configure_optimizers may return, and as what.
            return _init_optimizers_and_lr_schedulers(self._module)[0]

    @cached_property
    def host_step_support(self) -> tuple[bool, str]:
        """Whether the model's optimizers step by bucket, and why they cannot step on the host."""
        return self._stand_in_step_support(on_host=True)

    @cached_property
    def master_step_support(self) -> tuple[bool, str]:
        """The same of masters on the device."""
        return self._stand_in_step_support(on_host=False)

    def _stand_in_step_support(self, on_host: bool) -> tuple[bool, str]:
        optimizers = self._optimizers
        try:
            for optimizer in optimizers:
                refuse_stand_ins(optimizer, on_host)
        except ValueError as error:
            return False, str(error)
        return all(map(may_step_by_bucket, optimizers)), ""


def representative_per_block(kinds: Sequence[Any]) -> list[int]:
    """Return for each block the place of one of its kind among the blocks that stay.

    Three stay of each run of one kind: the first also makes what all of them save.
    """
    places: list[int] = []
    for index, kind in enumerate(kinds):
        is_left_out = index > 2 and all(kind == other for other in kinds[index - 3 : index])
        places.append(places[-1] if is_left_out else max(places, default=-1) + 1)
    return places


def container_of(
    module: LightningModule, names: Sequence[str]
) -> nn.ModuleList | nn.Sequential | None:
    """Return the list that has these blocks, and no others, in their order; None: there is none."""
    name, _, number = names[0].rpartition(".")
    if number != "0" or [*names] != [f"{name}.{index}" for index in range(len(names))]:
        return None
    container = module.get_submodule(name)
    if not isinstance(container, nn.ModuleList | nn.Sequential):
        return None
    return container if len(container) == len(names) else None


@contextmanager
def leaving_out_blocks(
    container: nn.ModuleList | nn.Sequential, places: Sequence[int]
) -> Iterator[None]:
    """Leave blocks out of a list meanwhile; of those with the same place the first one stays."""
    blocks = [*container]
    del container[:]
    container.extend(blocks[places.index(place)] for place in range(max(places) + 1))
    try:
        yield
    finally:
        del container[:]
        container.extend(blocks)


def _move_shapes_to_host(module: LightningModule) -> None:
    """Let shapes that nothing has loaded, on the meta device, be on the host as the others are."""
    on_host: dict[int, Tensor] = {}
    for slot in find_slots(module):
        shape = slot.tensor
        if isinstance(shape, RemoteTensor) and shape.is_meta:
            slot.put(on_host.setdefault(id(shape), shape.on_device(_CPU)))


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Keep back the trainer's lines on devices, which are not about those of the plan."""
    log = logging.getLogger("lightning.pytorch")
    before = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(before)


@contextmanager
def _no_advice() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
