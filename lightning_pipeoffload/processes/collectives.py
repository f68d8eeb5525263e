"""The collective operations that Lightning, callbacks and hooks call on a strategy.

Barriers, broadcasts and decisions are over all processes. Gathers and reductions are over the
replicas, as under ddp: each rank with its counterparts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning.fabric.utilities.distributed import (
    _sync_ddp_if_available,  # private: as Lightning's own strategies
)
from torch import Tensor
from typing_extensions import override

from lightning_pipeoffload.processes.joint_processes import JointProcesses
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.transport import blaming_peers
from lightning_pipeoffload.runtime.users_code.tensor_slots import find_slots


class Collectives(JointProcesses):
    """Adds the operations over replicas."""

    _group: PipelineGroup | None = None
    # Returns the result of the next broadcast in place of a broadcast that would wait.
    answer: Callable[[Any], Any] | None = None

    @property
    def group(self) -> PipelineGroup:
        """The pipeline's processes.

        Raises:
            RuntimeError: They are not connected yet.
        """
        if self._group is None:
            raise RuntimeError("the pipeline's processes are not connected yet")
        return self._group

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        answer, self.answer = self.answer, None
        return super().broadcast(obj, src) if answer is None else answer(obj)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather this rank's tensor of each replica; with one replica return it as it is."""
        if self._group is None or self._group.num_replicas == 1:
            return tensor
        return self._group.replicas.gather_tensor(tensor, differentiable=sync_grads)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduce this rank's tensor of each replica."""
        if self._group is None or self._group.num_replicas == 1 or not isinstance(tensor, Tensor):
            return tensor
        if self._group.replicas.is_alone_with(tensor):
            return tensor
        # A copy: the sum is in place, and a step may have logged the tensor.
        return _sync_ddp_if_available(tensor.clone(), self._group.replicas.group, reduce_op)


def gather_tensor(pipeline: Pipeline, group: PipelineGroup, tensor: Tensor) -> Tensor:
    """Return a copy of a parameter, buffer or gradient on every rank; all ranks call it.

    Raises:
        ValueError: The tensor is none of these, or the other ranks gather another one.
    """
    name = next((name for name, found in _known(pipeline) if found is tensor), "")
    has_value = bool(name) and not isinstance(tensor, ShapeOnly)
    asked = group.gather((name, has_value))
    _check_alike([each for each, _ in asked], tensor)
    owner = next(rank for rank, (_, has) in zip(group.global_ranks, asked, strict=True) if has)
    with blaming_peers("lost a rank while gathering a tensor"):
        return group.bring_to_all(tensor, owner).to(tensor.device)


def _known(pipeline: Pipeline) -> Iterator[tuple[str, Tensor | None]]:
    for slot in find_slots(pipeline.module):
        yield slot.name, slot.tensor
        if slot.kind == "_parameters":
            yield f"{slot.name}.grad", slot.tensor.grad


def _check_alike(names: list[str], tensor: Tensor) -> None:
    if not all(names):
        raise ValueError(
            f"trainer.strategy.gather() was given a tensor of shape {tuple(tensor.shape)} that is "
            f"no parameter, buffer or gradient of the module; give it the parameter itself, not "
            f"what was computed from it"
        )
    if len(set(names)) > 1:
        raise ValueError(
            f"the ranks ask trainer.strategy.gather() for different tensors, {', '.join(names)}; "
            f"call it in the same order on all of them"
        )
