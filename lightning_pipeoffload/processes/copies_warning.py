"""Says so before processes are started that would each hold the whole of a large module."""

from __future__ import annotations

import logging
from itertools import chain

from torch import nn

from lightning_pipeoffload.runtime.memory.machine_memory import machine_memory
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.schedule.quantities import bytes_text

log = logging.getLogger(__name__)

_ADVICE = """\
%s has %s, which each of this machine's %d processes makes as a whole: %s of the %s that are free. \
Made in configure_model, each makes its own part only:
    def configure_model(self):
        if self.model is None:  # which __init__ sets
            self.model = ...  # what __init__ has made there until now"""


def warn_of_copies(module: nn.Module, num_processes: int) -> None:
    """Warn where copies of a module take more than half of the machine's free memory.

    Args:
        module: The user's module, as ``__init__`` has made it.
        num_processes: The number of processes of this machine.
    """
    tensors = {id(t): t for t in chain(module.parameters(), module.buffers())}
    held = (t for t in tensors.values() if t.device.type == "cpu" and not isinstance(t, ShapeOnly))
    size = sum(tensor.nbytes for tensor in held)
    machine = machine_memory()
    needed = num_processes * size
    if num_processes > 1 and machine.total and needed > machine.available / 2:
        sizes = bytes_text(size), num_processes, bytes_text(needed), bytes_text(machine.available)
        log.warning(_ADVICE, type(module).__name__, *sizes)
