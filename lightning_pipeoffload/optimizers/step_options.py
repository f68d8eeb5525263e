"""The inputs of an optimizer's step besides gradients, which the ranks compare."""

from __future__ import annotations

import marshal
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeoffload.runtime import late_values
from lightning_pipeoffload.runtime.leaves import map_operands

_PLAIN = (bool, int, float, str, type(None))


class StepOptions:
    """The current options of optimizers' groups, trained parameters and number of steps.

    Args:
        optimizers: The trainer's optimizers.
        trained: For each parameter of the module 1 if it trains, else 0.
        num_steps: The number of calls of ``optimizer.step``.
    """

    def __init__(self, optimizers: Sequence[Optimizer], trained: bytes, num_steps: int) -> None:
        self._trained, self._num_steps = trained, num_steps
        self._groups: Any = [
            [
                {**group, "params": len(group["params"]), "param_names": None}
                for group in optimizer.param_groups
            ]
            for optimizer in optimizers
        ]
        self._known = b""
        try:
            # The quickest bytes of numbers and strings; version 2 has no references.
            self._known = marshal.dumps((self._groups, trained, num_steps), 2)
        except ValueError:
            self._groups = map_operands(_start_reading, self._groups)

    def digest(self) -> int:
        """Return a checksum; waits for tensors of an accelerator."""
        if not self._known:
            self._known = marshal.dumps((self._read(), self._trained, self._num_steps), 2)
        return zlib.crc32(self._known)

    def _read(self) -> Any:
        return map_operands(lambda leaf: leaf() if callable(leaf) else leaf, self._groups)

    def describe(self, names: Sequence[str]) -> dict[str, str]:
        """Describe each of them, given the names of the module's parameters."""
        described = {
            f"{'the number of ' if key == 'params' else ''}{key} in group {place} of optimizer {i}":
            repr(value)
            for i, groups in enumerate(self._read())
            for place, group in enumerate(groups)
            for key, value in group.items()
        }  # fmt: skip
        trained = zip(names, self._trained, strict=True)
        described |= {name: "trained" if trains else "frozen" for name, trains in trained}
        return {**described, "the number of calls of optimizer.step": str(self._num_steps)}


def _start_reading(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        read: Callable[[], Tensor] = late_values.start_reading(leaf)
        return lambda: read().tolist()
    return leaf if isinstance(leaf, _PLAIN) else type(leaf).__qualname__
