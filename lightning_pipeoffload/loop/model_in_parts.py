"""Runs ``configure_model`` so that no rank ever holds the whole module."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lightning_pipeoffload.checkpoints.checkpoint_hooks import CheckpointHooks
from lightning_pipeoffload.checkpoints.whole_again import make_whole
from lightning_pipeoffload.loop.pipeline_run import PipelineRun
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.runtime.cut.absent_values import ModuleCopies, absent_in
from lightning_pipeoffload.runtime.making.blueprint import Blueprint, draw_blueprint
from lightning_pipeoffload.runtime.making.construction import constructing
from lightning_pipeoffload.runtime.making.parted_module import PartedModule


class ModelInParts(CheckpointHooks):
    """Makes the layers that a module has in ``configure_model`` where their stages are."""

    settings: PipelineSettings
    _run: PipelineRun | None = None
    _blueprint: Blueprint | None = None
    _copies: ModuleCopies | None = None

    @override
    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        if self._run is not None and self._run.pipeline.module is not model:
            self._forget_run()

    def _forget_run(self) -> None:
        """Drop what is of a module, or of layers, that this trainer has no more."""
        self._run, self._state = None, None
        self.optimizers, self.lr_scheduler_configs = [], []

    @override
    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Lightning runs ``configure_model`` in here, which has run once before."""
        if self.group.num_ranks == 1 or not is_overridden("configure_model", self._module):
            yield
            return
        with self._noting_no_copies():
            yield from self._make()

    @contextmanager
    def _noting_no_copies(self) -> Iterator[None]:
        """Let copies that the module is made of be no business of those that follow it."""
        if self._copies is None:
            yield
            return
        self._copies.pause()
        try:
            yield
        finally:
            self._copies.resume()

    def _make(self) -> Iterator[None]:
        self._blueprint = None
        is_new = self._run is None or self._run.pipeline.module is not self._module
        if is_new and self.settings.schedule == "auto":
            self.group.place(self.settings.provisional_schedule(self.group.num_ranks))
        blueprint = self._draw_blueprint()
        if blueprint is None:
            yield
            return
        places = [f"stage {s}, on {self._global_rank(s)}" for s in range(len(blueprint.counts))]
        local = [s for s, rank in enumerate(self.group.stage_ranks) if rank == self.group.rank]
        with _without_advice(), constructing(self._module, blueprint, local, places):
            yield
        self._forget_run()
        self._blueprint = blueprint

    def _global_rank(self, stage: int) -> str:
        return f"global rank {self.group.global_ranks[self.group.stage_ranks[stage]]}"

    def _draw_blueprint(self) -> Blueprint | None:
        """Find out what ``configure_model`` makes, from which all ranks start alike."""
        blueprint = self._try_out()
        if blueprint is not None and absent_in(self._module):
            make_whole(self._module, self.group)
            blueprint = self._try_out()
        return blueprint

    def _try_out(self) -> Blueprint | None:
        with _without_advice(), self.precision_plugin.module_init_context():
            return draw_blueprint(
                self._module,
                self._module.configure_model,
                self.group.stage_ranks,
                self.settings.blocks,
                self.settings.split,
            )

    def _take_parts(self) -> PartedModule | None:
        """Return the module as it was made; None if it was made whole."""
        blueprint, self._blueprint = self._blueprint, None
        if blueprint is None:
            return None
        group = self.group
        return PartedModule(
            self._module, blueprint, group.stage_ranks, group.rank, group.send_to_all
        )

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict)
        if self._blueprint is not None:
            loaded = self._blueprint.values.keys() & checkpoint["state_dict"].keys()
            self._blueprint.values.update(dict.fromkeys(loaded, "checkpoint"))


@contextmanager
def _without_advice() -> Iterator[None]:
    """Let nobody be told by ``trainer.init_module`` to use ``configure_model``, who does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*init_module.* cannot fully support")
        yield
