"""Runs ``configure_model`` so that no rank ever holds the whole module."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_pipeoffload.checkpoints import broadcast_split_values
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.runtime import replaced
from lightning_pipeoffload.runtime.comm import PipelineGroup
from lightning_pipeoffload.runtime.cut import ModuleCopies, find_remote_slots
from lightning_pipeoffload.runtime.making import (
    Blueprint,
    PartedModule,
    constructing_local_stages,
    make_blueprint,
)
from lightning_pipeoffload.runtime.shapes import refuse_dtensor_weight
from lightning_pipeoffload.runtime.tensor_parallel import (
    INSTEAD,
    sharding_layers,
    sharding_without_scatter,
)

_ONE_RANK = (
    'self.device_mesh["data_parallel"] has one rank, so that fully_shard under '
    f"`if ...size() > 1` is left out: {INSTEAD}"
)


class PartedModuleBuilder:
    """Makes the layers that a module has in ``configure_model`` where their stages are."""

    def __init__(
        self,
        module: LightningModule,
        group: PipelineGroup,
        settings: PipelineSettings,
        precision: Precision,
        trains: bool,
    ) -> None:
        self._module, self._group = module, group
        self._settings, self._precision = settings, precision
        self._blueprint: Blueprint | None = None
        # Deep copies of the module that hooks make before it is split.
        mesh = self._group.device_mesh
        follows = trains and (self._group.num_ranks > 1 or mesh is not None)
        self._copies = ModuleCopies(self._module) if follows else None
        if mesh is not None:
            # Private: as Lightning sets it.
            self._module._device_mesh = mesh

    @property
    def has_parts(self) -> bool:
        """Return whether this rank has made its layers and no step has run yet."""
        return self._blueprint is not None

    @contextmanager
    def running_configure_model(self, is_new: bool) -> Iterator[None]:
        """Lightning runs ``configure_model`` in here, which has run once before.

        Args:
            is_new: Whether no run before this one has cut the module.
        """
        mesh = self._group.device_mesh
        if mesh is None:
            with self._constructing_parts(is_new):
                yield
            return
        if is_new and find_remote_slots(self._module):
            raise ValueError(
                "the module was trained by another Trainer over tensor_parallel_size above 1, "
                "whose ranks each have a part of it; load its checkpoint into a new module"
            )
        with _noticing_data_mesh(is_new), self._constructing_parts(is_new):
            yield
        self.update_copies()

    @contextmanager
    def _constructing_parts(self, is_new: bool) -> Iterator[None]:
        # A callback that averages weights calls configure_model in its setup.
        has_run = any(isinstance(parameter, DTensor) for parameter in self._module.parameters())
        has_own_layers = is_overridden("configure_model", self._module) and not has_run
        if self._group.num_ranks == 1 or not has_own_layers:
            with self._keeping_local_shards():
                yield
            return
        self._blueprint = None
        with self._recording_no_copies():
            if is_new and self._settings.schedule == "auto":
                self._group.assign_stages(
                    self._settings.provisional_schedule(self._group.num_ranks)
                )
            blueprint = self._make_blueprint()
            if blueprint is None:
                with self._keeping_local_shards():
                    yield
                return
            ranks = self._group.stage_ranks
            where = [
                f"stage {s}, on global rank {self._group.global_ranks[ranks[s]]}"
                for s in range(len(blueprint.counts))
            ]
            local = [s for s, rank in enumerate(ranks) if rank == self._group.rank]
            with (
                _without_init_module_warning(),
                constructing_local_stages(self._module, blueprint, local, where),
                self._keeping_local_shards(),
                self._sharding_without_broadcast(),
            ):
                yield
            self._blueprint = blueprint

    @contextmanager
    def _keeping_local_shards(self) -> Iterator[None]:
        """Let tensor ranks share the layers that are made within the context.

        Raises:
            ValueError: A layer is shared where there are no such ranks.
        """
        mesh = self._group.device_mesh
        if mesh is None:
            yield
            for name, parameter in self._module.named_parameters():
                refuse_dtensor_weight(name, parameter)
            return
        with sharding_layers(self._module, mesh):
            yield

    @contextmanager
    def _sharding_without_broadcast(self) -> Iterator[None]:
        """Divide parameters among tensor ranks, on ranks that make their own parts."""
        if self._group.device_mesh is None:
            yield
            return
        # What was made in __init__, before ranks had the same generators, may differ.
        have_equal_values = next(self._module.parameters(), None) is None
        with sharding_without_scatter(have_equal_values):
            yield

    @contextmanager
    def _recording_no_copies(self) -> Iterator[None]:
        """Leave copies out of which the module is made."""
        if self._copies is None:
            yield
            return
        self._copies.pause()
        try:
            yield
        finally:
            self._copies.resume()

    def _make_blueprint(self) -> Blueprint | None:
        """Run ``configure_model`` without values; None where it makes no blocks."""
        blueprint = self._make_blueprint_once()
        if blueprint is not None and find_remote_slots(self._module):
            broadcast_split_values(self._module, self._group)
            blueprint = self._make_blueprint_once()
        return blueprint

    def _make_blueprint_once(self) -> Blueprint | None:
        with _without_init_module_warning(), self._precision.module_init_context():
            return make_blueprint(
                self._module,
                self._configure,
                self._group.stage_ranks,
                self._settings.blocks,
                self._settings.split,
                self._group.devices.slowness_per_stage(self._group.stage_ranks),
                self._group.devices.memory_per_stage(self._group.stage_ranks),
            )

    def _configure(self) -> None:
        with self._keeping_local_shards(), self._sharding_without_broadcast():
            self._module.configure_model()

    def pop_parted_module(self) -> PartedModule | None:
        """Return the module in parts; None if it was made whole, and has all values then."""
        blueprint, self._blueprint = self._blueprint, None
        if blueprint is None:
            broadcast_split_values(self._module, self._group)
            return None
        group = self._group
        return PartedModule(
            self._module, blueprint, group.stage_ranks, group.rank, group.broadcast_to_devices
        )

    def update_copies(self) -> None:
        """Have copies of the module follow it: shapes, and tensors, where it has them now."""
        if self._copies is not None:
            self._copies.update_copies()

    def release_copies(self) -> None:
        """Follow no more copies."""
        if self._copies is not None:
            self._copies.stop_tracking()
            self._copies = None


@contextmanager
def _noticing_data_mesh(is_new: bool) -> Iterator[None]:
    """Log a notice if ``configure_model`` reads the part of the mesh that has one rank here."""
    plain = DeviceMesh.__getitem__
    read: set[str] = set()

    def get(mesh: DeviceMesh, names: Any) -> DeviceMesh:
        read.update([names] if isinstance(names, str) else names)
        return plain(mesh, names)

    with replaced(DeviceMesh, "__getitem__", get):
        yield
    if is_new and "data_parallel" in read:
        rank_zero_info(_ONE_RANK)


@contextmanager
def _without_init_module_warning() -> Iterator[None]:
    """Silence the advice of ``trainer.init_module`` to use ``configure_model``."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*init_module.* cannot fully support")
        yield
