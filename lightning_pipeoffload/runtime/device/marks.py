"""Names in the trace of a profiler, and messages that its trace must not follow.

Where no profiler runs nothing here costs a step anything: the executor asks once a step, and then
runs its actions with these marks or without (``Executor.start``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function

# Private: torch has no public question of this kind.
is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
_NOTHING = nullcontext()


def profiler_range(name: str) -> AbstractContextManager[Any]:
    """Return a context that a running profiler shows as ``name``.

    That is ``torch.profiler.profile``, or ``torch.autograd.profiler.emit_nvtx``, by which Nsight
    Systems gets the names as NVTX ranges.
    """
    return record_function(name) if is_profiled() else _NOTHING


def unprofiled() -> AbstractContextManager[None]:
    """Return a context in which asynchronous work over gloo is started, and not recorded.

    gloo tells a profiler from a thread of its own that the work has ended. Where the profiler has
    stopped by then, it writes to freed memory, and the process dies.
    """
    return _recording_nothing() if is_profiled() else _NOTHING


@contextmanager
def _recording_nothing() -> Iterator[None]:
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)
