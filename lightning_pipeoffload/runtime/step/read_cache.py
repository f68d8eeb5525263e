"""An F that reuses the values that an earlier F of the rank has read from the device.

Each stage runs the code before its blocks. A value that the rank's first stage has read there is
stored, for the same microbatch and line, so that later stages do not wait for the device again::

    stage 0 of the rank    if mask.all():    waits for the device; the value is stored
    stage 3 of the rank    if mask.all():    gets the stored value

Only lines are included whose operand, as the trace shows, is computed only from the batch and from
constants, so that it is the same on every stage.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_pipeoffload.runtime import ACTIVE_SETTINGS, replaced
from lightning_pipeoffload.runtime.cut import ReadPlace
from lightning_pipeoffload.runtime.step.stage_pass import StagePass

_READERS = ("__bool__", "__float__", "__int__", "__index__", "item")


class ReadCachePass(StagePass):
    """One F that reuses values that an earlier F of the rank has read from the device."""

    @override
    def run(self) -> Any:
        context, microbatch = self._context, self._microbatch
        is_first = context.stage.index == min(context.tensors.local_stages)
        if is_first or microbatch.read_cache is None:
            microbatch.read_cache = {}
        self._cache = microbatch.read_cache
        self._segment: int | None = 0
        self._counts: dict[ReadPlace, int] = {}
        self._thread = get_ident()
        with ACTIVE_SETTINGS.during(self):
            return super().run()

    @override
    def call_block(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._segment = None
        output = super().call_block(index, args, kwargs)
        self._segment = self._num_calls
        return output

    def read(self, tensor: Tensor, plain: Callable[[Tensor], Any]) -> Any:
        """Return ``plain(tensor)``, or the stored result of the same read in an earlier F.

        Args:
            tensor: The tensor on the device.
            plain: Torch's own method, which waits for the device.
        """
        if self._segment is None or get_ident() != self._thread:
            return plain(tensor)
        frame = sys._getframe(2)
        place = ReadPlace(self._segment, frame.f_code, frame.f_lineno)
        if place not in self._step_record.reads.common:
            return plain(tensor)
        count = self._counts[place] = self._counts.get(place, 0) + 1
        results = self._cache.setdefault(place, [])
        if len(results) < count:
            results.append(plain(tensor))
        return results[count - 1]


@contextmanager
def patching_scalar_reads() -> Iterator[None]:
    """Replace the methods of ``torch.Tensor`` that read a scalar, such as ``item``."""
    with ExitStack() as stack:
        for name in _READERS:
            stack.enter_context(replaced(Tensor, name, _cached(getattr(Tensor, name))))
        yield


def _cached(plain: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def read(tensor: Tensor) -> Any:
        running = ACTIVE_SETTINGS.latest(ReadCachePass)
        if running is None or type(tensor) is not Tensor:
            return plain(tensor)
        return running.read(tensor, plain)

    return read
