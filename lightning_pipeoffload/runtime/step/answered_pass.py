"""An F whose reads of the device are answered by those of an earlier F of the rank.

Each stage runs the code before its blocks. A value that the first one has read there, of the same
microbatch and at the same line, need not be waited for again::

    stage 0 of the rank    if mask.all():    waits for the device; the value is kept
    stage 3 of the rank    if mask.all():    gets that value

Only lines are answered whose operand is the same on every stage by the trace: computed from the
batch and from constants.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from threading import get_ident
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_pipeoffload.runtime.cut.device_reads import ReadPlace
from lightning_pipeoffload.runtime.in_force import IN_FORCE
from lightning_pipeoffload.runtime.step.stage_pass import StagePass

_READERS = ("__bool__", "__float__", "__int__", "__index__", "item")


class AnsweredPass(StagePass):
    """One F that gets values read from the device from an earlier F of the rank."""

    @override
    def run(self) -> Any:
        context, microbatch = self._context, self._microbatch
        is_first = context.stage.index == min(context.tensors.local_stages)
        if is_first or microbatch.answers is None:
            microbatch.answers = {}
        self._answers = microbatch.answers
        self._segment: int | None = 0
        self._counts: dict[ReadPlace, int] = {}
        self._thread = get_ident()
        with IN_FORCE.during(self):
            return super().run()

    @override
    def call_block(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._segment = None
        output = super().call_block(index, args, kwargs)
        self._segment = self._num_calls
        return output

    def read(self, tensor: Tensor, plain: Callable[[Tensor], Any]) -> Any:
        """Return the result of ``plain(tensor)``, or that of the same read in an earlier F."""
        if self._segment is None or get_ident() != self._thread:
            return plain(tensor)
        frame = sys._getframe(2)
        place = ReadPlace(self._segment, frame.f_code, frame.f_lineno)
        if place not in self._step_record.reads.common:
            return plain(tensor)
        count = self._counts[place] = self._counts.get(place, 0) + 1
        answers = self._answers.setdefault(place, [])
        if len(answers) < count:
            answers.append(plain(tensor))
        return answers[count - 1]


_replaced = ExitStack()  # what gives torch its readers back


def install_answers() -> None:
    """Replace the methods of ``torch.Tensor`` that read a scalar, such as ``item``; idempotent."""
    for name in _READERS:
        plain = getattr(Tensor, name)
        if not hasattr(plain, _MARK):
            _replaced.callback(_give_back, name, vars(Tensor).get(name))
            setattr(Tensor, name, _answered(plain))


def remove_answers() -> None:
    """Restore torch's own methods."""
    _replaced.close()


def _give_back(name: str, before: Any) -> None:
    if before is None:
        delattr(Tensor, name)
    else:
        setattr(Tensor, name, before)


_MARK = "_pipeoffload_answered"


def _answered(plain: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def read(tensor: Tensor) -> Any:
        running = IN_FORCE.latest(AnsweredPass)
        if running is None or type(tensor) is not Tensor:
            return plain(tensor)
        return running.read(tensor, plain)

    setattr(read, _MARK, True)
    return read
