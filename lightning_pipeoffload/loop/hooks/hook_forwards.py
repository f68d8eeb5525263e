"""Calls of the module, or of a submodule, in hooks.

Outside of steps other stages do not know what to compute. So every rank runs the whole call, each
block of it on its owner, as in evaluation steps that cannot be cut, and all have its result. All
ranks have to make the same call; one that makes it alone waits for a while, and raises.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._pytree import tree_map  # private: see runtime/leaves
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_pipeoffload.processes import StoreBarrier
from lightning_pipeoffload.runtime.run import Pipeline
from lightning_pipeoffload.runtime.shapes import substitute_values
from lightning_pipeoffload.runtime.users_code import in_brackets, running_user_line
from lightning_pipeoffload.runtime.whole import WholeRuns

_TO_EXPLAIN = timedelta(seconds=5)  # for the others to say what they call, once one has not come


class HookForwards:
    """The calls of a module that is cut, and of its submodules, outside of its steps."""

    def __init__(self, pipeline: Pipeline, runs: WholeRuns, barrier: StoreBarrier) -> None:
        self._pipeline, self._runs = pipeline, runs
        self._group = pipeline.group
        self._barrier = barrier
        self._calls = self._group.make_pipeline_group("calls in hooks", backend="gloo")
        self._names: dict[int, str] = {}
        self._named: Mapping[str, frozenset[int]] = {}
        self._handles: list[RemovableHandle] = []
        self._outermost: nn.Module | None = None
        self._depth = 0
        self._had_gradients = False
        self._running = ExitStack()
        self.install_hooks()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run a step, whose own calls are none of a hook's."""
        self.remove_hooks()
        try:
            yield
        finally:
            self.install_hooks()

    def install_hooks(self) -> None:
        """Follow calls from now on, if the module is cut."""
        if self._pipeline.is_split:
            self._handles = [
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._exit, always_call=True),
            ]

    def remove_hooks(self) -> None:
        """Follow no more calls."""
        while self._handles:
            self._handles.pop().remove()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._outermost is not None:
            self._depth += module is self._outermost
            return
        name = self._modules_with_remote_tensors().get(id(module))
        if name is None:
            return
        self._wait_for_all_to_call(name)
        self._had_gradients = torch.is_grad_enabled()
        self._running.enter_context(self._runs.prepare_run(None, module).running())
        self._outermost, self._depth = module, 1

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _exit(self, module: nn.Module, args: Any, result: Any) -> Any:
        if module is not self._outermost:
            return None
        self._depth -= 1
        if self._depth:
            return None
        self._outermost = None
        error = sys.exc_info()
        if result is None and error[1] is not None:  # the forward has failed
            self._running.__exit__(*error)
            return None
        self._running.close()
        values = substitute_values(result)
        return tree_map(_refuse_backward, values) if self._had_gradients else values

    def _modules_with_remote_tensors(self) -> dict[int, str]:
        tensors = self._pipeline.tensors
        if self._named is not tensors.owners:  # the first batch may change them
            self._named = tensors.owners
            remote = [slot for slot in tensors.slots if not tensors.is_on_every_stage(slot.name)]
            lacking = {id(slot.module) for slot in remote}
            self._names = {
                id(module): name or type(module).__name__
                for name, module in self._pipeline.module.named_modules()
                if any(id(part) in lacking for part in module.modules())
            }
        return self._names

    def _wait_for_all_to_call(self, name: str) -> None:
        """Wait for all ranks to call the same module; raise ``RuntimeError`` if one does not."""
        if self._do_all_call(name):
            return
        calls = self._barrier.collect_purposes(name, _TO_EXPLAIN)
        missing = [rank for rank in sorted(self._group.global_ranks) if rank not in calls]
        others = [
            f"global rank {rank} calls {what}" for rank, what in calls.items() if what != name
        ]
        line = in_brackets(running_user_line())
        reason = self._explain_missing(missing) if missing else f"where {others[0]}"
        raise RuntimeError(
            f"{name} is called outside of a step{line}, {reason}; each rank has a part of the "
            f"weights, so call the same on all ranks and on the same input, outside of "
            f"`if trainer.is_global_zero` and rank_zero_only, and use what it returns on one"
        )

    def _do_all_call(self, name: str) -> bool:
        """Compare checksums of what ranks call, which costs little for each token of a text."""
        checksum = zlib.crc32(name.encode())
        bounds = torch.tensor([checksum, -checksum])
        work = self._calls.allreduce([bounds], op=dist.ReduceOp.MAX)
        try:
            work.wait(timedelta(seconds=self._barrier.seconds))
        except RuntimeError:  # some rank has not come, or has ended
            return False
        return bounds.tolist() == [checksum, -checksum]

    def _explain_missing(self, ranks: list[int]) -> str:
        return f"and global ranks {ranks} have not come to it for {self._barrier.seconds:.0f} s"


class _RefuseBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mark: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            "a forward in a hook has no backward: what the module returns outside of a step leads "
            "back to no weights; compute the loss in training_step"
        )


def _refuse_backward(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    mark = torch.zeros((), requires_grad=True, device=leaf.device)
    return _RefuseBackward.apply(leaf, mark)
