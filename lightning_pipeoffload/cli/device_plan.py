"""``pipeoffload-plan schedule=auto device=h100 model=...``: a plan from shapes and data sheets.

Operations are counted, and divided by what the device reaches; bytes are those of shapes. Of the
device's memory each cut leaves what its weights, gradients and optimizer states do not take.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lightning_pipeoffload.cli.auto_plan import describe, print_choice, wanted_options
from lightning_pipeoffload.cli.border_options import BorderOptions
from lightning_pipeoffload.cli.devices import device_named, kind_of_precision
from lightning_pipeoffload.cli.model_probe import ModelProbe
from lightning_pipeoffload.cli.units import MEASURED
from lightning_pipeoffload.planning.memory_limit import parse_bytes
from lightning_pipeoffload.planning.memory_needs import MemoryNeeds
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.schedule import (
    Costs,
    Kind,
    MemoryLimitError,
    Schedule,
    ScheduleError,
    split_fused_backward,
)
from lightning_pipeoffload.schedule.candidates import Option
from lightning_pipeoffload.schedule.families import FAMILIES
from lightning_pipeoffload.schedule.make_plan import Plan, PlanRequest, make_plan
from lightning_pipeoffload.schedule.mebibytes import mebibytes
from lightning_pipeoffload.schedule.placement import stages_on

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["plan_for_device"]


def plan_for_device(config: DictConfig) -> tuple[Schedule, Costs, dict[str, Any]]:
    """Return the fastest plan that fits, its costs, and what JSON says of it; print the others.

    Raises:
        ValueError: The device is unknown, the model cannot be built, or nothing fits.
    """
    planner = DevicePlanner(config)
    plan = planner.choose()
    option = plan.best.option
    if config.format == "text":
        print_choice(plan, MEASURED)
        Console().out(f"{planner.words}\n", highlight=False)
    told = describe(plan) | planner.figures(option)
    return split_fused_backward(plan.schedule), plan.costs, told


class DevicePlanner:
    """Plans one model for devices of one kind.

    Args:
        config: Conf/plan.yaml with the command line's overrides.

    Raises:
        ValueError: The device is unknown, or the model cannot be built.
    """

    def __init__(self, config: DictConfig) -> None:
        self._config = config
        self._device = device_named(config.device, config.efficiency)
        self._asked = wanted_options(config, config.strategy.recompute)
        self._num_ranks = config.num_ranks

    @cached_property
    def _probe(self) -> ModelProbe:
        return ModelProbe(self._config)

    @property
    def memory(self) -> float:
        """Bytes of a device."""
        given = self._config.device_memory
        return self._device.memory if given is None else parse_bytes(given, "device_memory")

    @property
    def _kind(self) -> str:
        return kind_of_precision(self._probe.precision)

    def figures(self, option: Option) -> dict[str, Any]:
        """Return what JSON says of the device, and of what the weights of an option take."""
        device = self._device
        return {
            "device": device.name,
            "precision": self._probe.precision,
            "efficiency": self._config.efficiency,
            "flops_per_second": device.flops[self._kind],
            "copy_rate": device.copy_rate,
            "link_rate": device.link_rate,
            "device_memory": self.memory,
            "taken_by_weights": self._taken(option),
        }

    @property
    def words(self) -> str:
        """What the figures go by."""
        device = self._device
        return (
            f"{device.name} at {self._config.efficiency:g} of its data sheet's rates: "
            f"{device.flops[self._kind] / 1e12:.4g} TFLOP/s dense {self._kind} "
            f"(precision {self._probe.precision}), copies {device.copy_rate / 1e9:.4g} GB/s each "
            f"way, messages {device.link_rate / 1e9:.4g} GB/s, memory {self.memory / 1e9:.4g} GB "
            f"less weights, gradients and optimizer states of the stages"
        )

    def choose(self) -> Plan:
        """Evaluate all families, or the one that is named.

        Raises:
            ScheduleError: Nothing fits, or the model cannot be cut.
        """
        name, config = self._config.strategy.schedule, self._config
        if name != "auto" and name not in FAMILIES:
            raise ScheduleError(
                f"schedule ({name}) cannot be planned for a device; use auto or one of "
                f"{', '.join(FAMILIES)}"
            )
        wanted = [option for option in self._asked if name in ("auto", option.schedule)]
        if not wanted:
            raise ScheduleError(f"num_chunks ({config.num_chunks}) is none that {name} takes")
        has_barrier = BorderOptions.of(config).has_barrier
        request = PlanRequest(
            self._num_ranks,
            wanted,
            self.costs_of,
            self.memory,
            config.strategy.offload,
            self._taken,
            lambda option: has_barrier,
        )
        try:
            return make_plan(request)
        except MemoryLimitError as error:
            _, memory, needed = error.args
            raise ScheduleError(
                f"{self._device.name} has {mebibytes(memory)}, and any plan needs "
                f"{mebibytes(needed)} or more of a device; use more num_ranks, a smaller batch, or "
                f"strategy.recompute=full"
            ) from None

    def costs_of(self, option: Option) -> Costs:
        """Return what the stages of an option cost, in seconds and bytes.

        Raises:
            ScheduleError: The model cannot be cut so.
        """
        needs, device = self.needs_of(option), self._device
        seconds = needs.flops_of_one / device.flops[self._kind]
        num_stages = len(needs.owned)
        compute: dict[str, Any] = {
            name: [seconds * work for work in needs.costs.per_stage(name, num_stages)]
            for name in ("forward", "backward_input", "backward_weight")
        }
        if option.recompute == "full":
            pairs = zip(compute["backward_input"], compute["forward"], strict=True)
            compute["backward_input"] = [b + f for b, f in pairs]
        activation = needs.costs.per_stage("activation", num_stages)
        copies = [kept / device.copy_rate for kept in activation]
        messages = [sent / device.link_rate for sent in needs.sent[Kind.SEND_F]]
        return replace(
            needs.costs,
            **compute,
            communication=messages,
            offload=copies,
            reload=copies,
            copy_lanes=2,
        )

    def needs_of(self, option: Option) -> MemoryNeeds:
        """Return what the stages of an option need.

        Raises:
            ScheduleError: The model cannot be cut so.
        """
        plan = option.placement(self._num_ranks), option.num_microbatches
        try:
            return self._probe.needs_of(*plan, self._settings(option))
        except ScheduleError:
            raise
        except ValueError as error:
            raise ScheduleError(str(error)) from error

    def _settings(self, option: Option) -> PipelineSettings:
        strategy = self._config.strategy
        return PipelineSettings(
            schedule=option.schedule,
            num_microbatches=option.num_microbatches,
            num_chunks=option.num_chunks,
            blocks=strategy.get("blocks"),
            split=strategy.get("split", "auto"),
            recompute=option.recompute,
        )

    def _taken(self, option: Option) -> float:
        """Return the bytes of what the fullest rank holds besides activations."""
        needs = self.needs_of(option)
        placement = option.placement(self._num_ranks)
        return max(needs.kept_by(stages_on(placement, rank)) for rank in range(self._num_ranks))
