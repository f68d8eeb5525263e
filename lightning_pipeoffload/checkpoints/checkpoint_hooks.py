"""The strategy's methods that Lightning calls to save and load checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeoffload.checkpoints.continued import Continued
from lightning_pipeoffload.checkpoints.file import MovingCheckpointIO, present
from lightning_pipeoffload.checkpoints.folder import (
    META_FILE,
    WholeCheckpoints,
    is_checkpoint_folder,
    read_checkpoint_folder,
    refuse_incomplete_folder,
    refuse_remote_folder,
    write_checkpoint_folder,
)
from lightning_pipeoffload.checkpoints.saved_values import SavedValues, shapes_of
from lightning_pipeoffload.checkpoints.shards import (
    BEFORE_FIRST_BATCH,
    join_saved,
    optimizer_parts_of,
    parts_of,
    place_saved,
)
from lightning_pipeoffload.checkpoints.split_state import SplitState
from lightning_pipeoffload.optimizers import (
    MasterWeights,
    OptimizedParameters,
    name_optimizer_state,
    number_optimizer_state,
    read_states,
)
from lightning_pipeoffload.processes import PipelineProcesses
from lightning_pipeoffload.runtime import without_collection
from lightning_pipeoffload.runtime.cut import load_quantization

_BY_RANKS = ("state_dict", "optimizer_states")  # entries of which each rank writes its own


class CheckpointHooks(WholeCheckpoints, PipelineProcesses):
    """Saves and loads a module and its optimizers, before and after the module is split.

    Attributes:
        continued: What is saved of the entry that runs, or ran last, for a fit that resumes it.
    """

    continued = Continued()
    _loaded = Continued()
    _masters: MasterWeights | None = None

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _trainer(self) -> Trainer:
        return self._module.trainer

    @property
    def _fits(self) -> bool:
        return self._trainer.state.fn == TrainerFn.FITTING

    @property
    def _resumed(self) -> Continued | None:
        """What the fit that runs continues; None: it resumes no other."""
        return self._loaded if self._fits and self._trainer.ckpt_path is not None else None

    @property
    def _split_state(self) -> SplitState | None:
        """The state of a split module; None until the module is split."""
        raise NotImplementedError

    @property
    def _parameters(self) -> OptimizedParameters:
        """The optimizers' parameters."""
        raise NotImplementedError

    def wait_for_parameters(self) -> None:
        """Wait for the pending parameters, before anything reads them."""
        self.group.replicas.pending.wait()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._refuse_alone("save_checkpoint")
        if self._split_state is not None:
            self.wait_for_parameters()  # an error may have come before they were read
            return self._split_state.of_module(self._save_distributed_checkpoint)
        if self.processes.group is not None and self.group.num_tensor_ranks > 1:
            raise RuntimeError(BEFORE_FIRST_BATCH)
        # Without a seed the ranks' modules differ until they are split.
        state = super().lightning_module_state_dict()
        if self._masters is not None:
            self._masters.replace_in(state, self._module)
        return state if self.is_global_zero else shapes_of(state, global_rank=0)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module, state = self.lightning_module, checkpoint["state_dict"]
        assert module is not None
        loaded = load_quantization(module, state, is_split=self._split_state is not None)
        if self._split_state is not None:
            self._split_state.load_module(state, strict)
        else:
            plain = copy.copy(state)  # with its attribute: the versions that modules load by
            for key in loaded:
                del plain[key]
            super().load_model_state_dict({**checkpoint, "state_dict": plain}, strict)
        if self._masters is not None and self._fits:
            self._masters.keep_loaded(parts_of(state, module))

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if self._split_state is not None:
            return self._split_state.of_optimizer(
                optimizer, by_name=self._save_distributed_checkpoint
            )
        if not self.is_global_zero:
            return {}
        state = super().optimizer_state(optimizer)
        if not self._save_distributed_checkpoint:
            return state
        return name_optimizer_state(state, self._parameters.names_in(optimizer))

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if (
            self.processes.group is None
        ):  # before the first run, or after forks: the module is whole
            if "optimizer_states" in checkpoint:
                self._refuse_without_optimizers()
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        self.continued.write_to(checkpoint)
        if self._split_state is None:  # what is not read yet may be in the file that is replaced
            for optimizer in self.optimizers:
                read_states(optimizer)
            if self._masters is not None:
                self._masters.read()
        if self._save_distributed_checkpoint:
            refuse_remote_folder(filepath, storage_options)
            self._save_folder(checkpoint, Path(self.group.world.broadcast(filepath, 0)))
            return
        # Another plugin may copy the checkpoint before it writes it.
        one_by_one = type(self.checkpoint_io) is MovingCheckpointIO
        checkpoint = join_saved(checkpoint, self.group)
        with without_collection(), SavedValues(checkpoint, self.group).coming(one_by_one) as coming:
            super().save_checkpoint(coming, filepath, storage_options=storage_options)

    def _save_folder(self, checkpoint: dict[str, Any], path: Path) -> None:
        by_ranks = {key: checkpoint[key] for key in _BY_RANKS if key in checkpoint}
        rest = {key: value for key, value in checkpoint.items() if key not in by_ranks}
        by_ranks["state_dict"] = place_saved(by_ranks["state_dict"])
        rest = join_saved(rest, self.group)
        with SavedValues(rest, self.group).coming(one_by_one=False) as whole:
            rest = whole
        write_checkpoint_folder({**rest, **by_ranks}, path, self.group.world)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        folder = Path(present(checkpoint_path))
        if not is_checkpoint_folder(folder):
            refuse_incomplete_folder(folder)
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        else:
            rest = self.checkpoint_io.load_checkpoint(folder / META_FILE, weights_only=weights_only)
            checkpoint = read_checkpoint_folder(folder, rest, weights_only, self._fits)
        self._loaded = Continued.read_from(checkpoint)
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        if not states:  # as on one device
            return
        if self.group.num_tensor_ranks > 1:
            of_all = zip(states, self._parameters.names, strict=True)
            states = [optimizer_parts_of(state, names, self._module) for state, names in of_all]
        if self._split_state is not None:
            self._split_state.load_optimizers(states)
            return
        # When the module is split, this rank's part is read and moved to the parameters' devices.
        for (optimizer, names), state in zip(self._parameters.named(), states, strict=True):
            with self._parameters.loading_state(optimizer):
                optimizer.load_state_dict(number_optimizer_state(state, names))
