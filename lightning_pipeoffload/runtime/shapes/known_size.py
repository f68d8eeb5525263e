"""What a rank knows of a gradient that it does not have: its 2-norm, and its largest element.

The owner computes both as the user's code would, and tells the other ranks. Code that asks a shape
for them, or for what follows from them, has the owner's answer, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten


@dataclass
class KnownSize:
    """Two numbers of a gradient that another rank has.

    Attributes:
        norm: The 2-norm, as ``torch.linalg.vector_norm`` returns it.
        largest: The largest absolute value of an element.
        is_current: Whether nothing was written to the gradient since.
    """

    norm: float
    largest: float
    is_current: bool = True


@dataclass(frozen=True)
class Derived:
    """What was computed, element by element, from a gradient.

    Attributes:
        size: The size of the gradient.
        what: "value", the gradient itself; "part", a view of some of it; "magnitude"; or which
            elements are "number", "bounded", "finite", "nan" or "infinite".
    """

    size: KnownSize
    what: str = "value"

    @property
    def is_memory(self) -> bool:
        """Whether a write to it is one to the gradient."""
        return self.what in ("value", "part")

    def view(self, func: torch._ops.OpOverload) -> Derived:
        """Return what a view is."""
        return self if func.overloadpacket in _WHOLE_VIEWS else Derived(self.size, "part")


_WHOLE_VIEWS = {aten.detach, aten.alias, aten.view}
_STEPS = {
    (aten.abs, "value"): "magnitude",
    (aten.isnan, "value"): "nan",
    (aten.isinf, "value"): "infinite",
    (aten.eq, "value", "value"): "number",
    (aten.ne, "value", "value"): "nan",
    (aten.ne, "magnitude", math.inf): "bounded",
    (aten.mul, "number", "bounded"): "finite",
    (aten.logical_not, "finite"): "infinite or nan",
}
# All that is not a number hides what else there is.
_ENDS: dict[tuple[Any, str], Callable[[KnownSize], float | None]] = {
    (aten.max, "magnitude"): lambda size: size.largest,
    (aten.amax, "magnitude"): lambda size: size.largest,
    (aten.all, "number"): lambda size: not math.isnan(size.largest),
    (aten.all, "finite"): lambda size: math.isfinite(size.largest),
    (aten.any, "nan"): lambda size: math.isnan(size.largest),
    (aten.any, "infinite"): lambda size: _is_infinite(size.largest),
    (aten.any, "infinite or nan"): lambda size: not math.isfinite(size.largest),
}


def _is_infinite(largest: float) -> bool | None:
    return None if math.isnan(largest) else math.isinf(largest)


def derive(packet: Any, operands: Sequence[Derived | float]) -> Derived | None:
    """Say what an operation makes of gradients, if what is known of them holds for it still.

    Args:
        packet: The operation.
        operands: The operation's operands: what is derived from gradients, and numbers.
    """
    sizes = [operand.size for operand in operands if isinstance(operand, Derived)]
    words = [operand.what if isinstance(operand, Derived) else operand for operand in operands]
    what = _STEPS.get((packet, *words))
    is_of_one = all(size is sizes[0] for size in sizes)
    return Derived(sizes[0], what) if what is not None and is_of_one else None


def find_answer(
    func: torch._ops.OpOverload, of: Derived, args: Sequence[Any], kwargs: dict[str, Any]
) -> float | None:
    """Return what an operation over all elements gives, if it is known.

    Args:
        func: The operation.
        of: Its operand.
        args: The other arguments.
        kwargs: The keyword arguments.
    """
    packet = func.overloadpacket
    if packet is not aten.linalg_vector_norm:
        return _ENDS[packet, of.what](of.size) if (packet, of.what) in _ENDS else None
    order = args[0] if args else kwargs.get("ord", 2)
    if of.what not in ("value", "magnitude") or kwargs.get("dtype") is not None:
        return None
    return {2: of.size.norm, math.inf: of.size.largest}.get(order)
