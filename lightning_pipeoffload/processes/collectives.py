"""What the ranks do together because Lightning, a callback or a hook asks a strategy for it.

Barriers, broadcasts and decisions are over all processes; what is gathered and reduced is over the
replicas, as under ddp: each rank's with that of its counterparts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.distributed import (
    _sync_ddp_if_available,  # private: as Lightning's own strategies
)
from torch import Tensor
from typing_extensions import override

from lightning_pipeoffload.processes.joint_end import JointEnd
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.users_code.users_lines import calling_line, in_brackets


class Collectives(JointEnd):
    """Answers for all ranks together, and refuses where one of them would wait alone."""

    _group: PipelineGroup | None = None
    # What answers the next broadcast, where nobody may wait for it.
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

    # Before the first run there is nobody to wait for, as in Lightning's own strategies.

    @override
    def barrier(self, name: str | None = None) -> None:
        self._refuse_alone("barrier")
        if self._group is not None:
            self._group.world.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self._refuse_alone("broadcast")
        answer, self.answer = self.answer, None
        if answer is not None:
            return answer(obj)
        return obj if self._group is None else self._group.world.broadcast(obj, src)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather over the replicas: what this rank of each has, in their order.

        Where there is one the tensor itself, as on one device.
        """
        if self._group is None or self._group.num_replicas == 1:
            return tensor
        return self._group.replicas.gather_tensor(tensor, differentiable=sync_grads)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduce over the replicas what this rank of each has."""
        if self._group is None or self._group.num_replicas == 1 or not isinstance(tensor, Tensor):
            return tensor
        if self._group.replicas.is_alone_with(tensor):
            return tensor
        # A copy: it sums in place, where what a step has logged may be.
        return _sync_ddp_if_available(tensor.clone(), self._group.replicas.group, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self._refuse_alone("reduce_boolean_decision")
        return decision if self._group is None else self._group.world.agree(decision, all)

    def _refuse_alone(self, name: str) -> None:
        """Refuse what needs all ranks where the others do not come to it."""
        self._refuse_after_failure(name)
        if self.is_in_step:
            raise RuntimeError(
                f"{name}() inside a step would wait for ever: the other ranks have left the step, "
                f"or are not there yet{in_brackets(calling_line())}; call it in a hook such as "
                f"on_train_batch_end"
            )
