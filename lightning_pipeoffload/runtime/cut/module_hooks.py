"""Hooks of a step's modules that a cut could break."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules import module as torchs

from lightning_pipeoffload.runtime.cut.observers import Observer, RunningTrace
from lightning_pipeoffload.runtime.cut.record_part import RecordPart
from lightning_pipeoffload.runtime.users_code import running_user_line


class HookedSpan(NamedTuple):
    """A call of a module with backward hooks that begins and returns in different segments."""

    name: str
    first: int
    last: int


@dataclass
class Hooks(RecordPart):
    """Hooks that a cut could break, as a part of a step's record.

    Attributes:
        brief: Blocks with a hook that the step itself registers and removes.
        spans: Calls of modules with backward hooks over several segments.
        line: A line that registers a hook on a tensor; "": none does.
    """

    brief: set[int] = field(default_factory=set)
    spans: list[HookedSpan] = field(default_factory=list)
    line: str = ""


class HookObserver(Observer[Hooks]):
    """Finds such hooks, of blocks, of modules around them and of tensors."""

    def __init__(self, trace: RunningTrace, hooks: Hooks) -> None:
        super().__init__(trace, hooks)
        self._num_hooks: dict[int, int] = {}  # by block, at its call

    def before_block(self, index: int, arguments: Any) -> None:
        self._num_hooks[index] = self._count(index)

    def _count(self, index: int) -> int:
        block = self._trace.chain.blocks[index]
        # Private: no public name lists the hooks of a module.
        return len(block._forward_hooks) + len(block._forward_pre_hooks)

    @property
    def hooked(self) -> set[int]:
        """The blocks that had hooks at their call."""
        return {index for index, count in self._num_hooks.items() if count}

    def record_function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func is Tensor.register_hook:
            self._part.line = running_user_line()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Find calls, over several segments, of modules with full backward hooks.

        Such a hook gets the gradients of the module's inputs and outputs in one call. Where a cut
        goes through the module no stage has both, and torch would not call the hook.
        """
        is_any = bool(torchs._global_backward_hooks)  # private, as is _backward_hooks
        parts = self._trace.module.named_modules()
        names = {part: name for name, part in parts if is_any or part._backward_hooks}
        begun: list[tuple[nn.Module, int]] = []

        def enter(part: nn.Module, args: tuple[Any, ...]) -> None:
            trains = any(isinstance(value, Tensor) and value.requires_grad for value in args)
            if part in names and trains:
                begun.append((part, self._trace.num_calls))

        def leave(part: nn.Module, args: Any, output: Any) -> None:
            if begun and begun[-1][0] is part:
                called = self._trace.calls.blocks[begun.pop()[1] : self._trace.num_calls]
                if called:
                    name = names[part] or "the module"
                    self._part.spans.append(HookedSpan(name, min(called), max(called) + 1))

        if not names:
            yield
            return
        before = torchs.register_module_forward_pre_hook(enter)
        with before, torchs.register_module_forward_hook(leave):
            yield

    def finish(self) -> None:
        counts = self._num_hooks.items()
        self._part.brief = {index for index, before in counts if self._count(index) < before}
