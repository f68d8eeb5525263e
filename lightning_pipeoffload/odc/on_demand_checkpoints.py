"""Checkpoints of what is sharded: folders as Lightning's own strategy writes them, and files."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeoffload.odc.on_demand_processes import OnDemandProcesses
from lightning_pipeoffload.odc.optimizer_file import load_whole_state, whole_state
from lightning_pipeoffload.odc.sharded_arithmetic import as_if_whole


class OnDemandCheckpoints(OnDemandProcesses):
    """Lets a file have of the optimizer what it has on one device."""

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if Path(checkpoint_path).is_dir():
            with ExitStack() as stack:
                for optimizer in self.optimizers:  # of which torch takes a step, to have a state
                    stack.enter_context(as_if_whole(optimizer))
                return super().load_checkpoint(checkpoint_path, weights_only)
        return self._load_file(checkpoint_path, weights_only)

    def _load_file(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        optimizers, self.optimizers = self.optimizers, []
        try:
            checkpoint = super().load_checkpoint(path, weights_only)
        finally:
            self.optimizers = optimizers
        for optimizer, state in zip(
            optimizers, checkpoint.get("optimizer_states", ()), strict=False
        ):
            load_whole_state(optimizer, state)
        return checkpoint

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        # Private: where Lightning's own keeps the argument.
        if not self._save_distributed_checkpoint:
            return whole_state(optimizer, keep=self.is_global_zero)
        with as_if_whole(optimizer):  # torch takes a step, to have a state
            return super().optimizer_state(optimizer)
