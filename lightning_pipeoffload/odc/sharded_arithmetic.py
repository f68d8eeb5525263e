"""Lets optimizers that look at whole matrices compute of shards what they would of all.

Most look at each element by itself, for which its shard does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer, Rprop, SparseAdam
from torch.overrides import TorchFunctionMode
from typing_extensions import override

_REFUSED = {
    Rprop: "it writes into those elements of a gradient that it chooses, which shards cannot",
    SparseAdam: "it takes sparse gradients only, which FSDP2 does not shard",
}


def refuse_optimizers(optimizers: Sequence[Any]) -> None:
    """Refuse what torch cannot compute of shards.

    Raises:
        ValueError: There is such an optimizer; the message names it.
    """
    for kind, reason in _REFUSED.items():
        if any(isinstance(optimizer, kind) for optimizer in optimizers):
            raise ValueError(
                f"{kind.__name__} does not go with strategy='odc': {reason}; use another "
                f"optimizer, such as AdamW"
            )


@contextmanager
def as_if_whole(optimizer: Optimizer) -> Iterator[None]:
    """Let the steps that an optimizer takes inside give what they would give on one device."""
    with ExitStack() as modes:

        def enter(_: Optimizer, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if kwargs.get("closure") is None:
                modes.enter_context(_AsIfWhole())
                return args, kwargs
            return args, {**kwargs, "closure": _outside(modes, kwargs["closure"])}

        hooks = (
            optimizer.register_step_pre_hook(enter),
            optimizer.register_step_post_hook(lambda *_: modes.close()),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _outside(modes: ExitStack, closure: Callable[[], Any]) -> Callable[[], Any]:
    """Return a closure that trains as always; what the optimizer does after it is another thing."""

    def call() -> Any:
        modes.close()
        result = closure()
        modes.enter_context(_AsIfWhole())
        return result

    return call


class _AsIfWhole(TorchFunctionMode):
    """Makes whole what is a sum over ranks, and what is rounded before it is multiplied.

    Adafactor squares norms in place, which sums that are not added up yet do not allow. Muon goes
    on in bfloat16, in which what the ranks' rows add up to is not the product of the matrices.
    """

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, DTensor) and (_is_partial(result) or _is_rounded(func, result)):
            return result.redistribute(placements=[Replicate()] * result.device_mesh.ndim)
        return result


def _is_partial(tensor: DTensor) -> bool:
    return any(placement.is_partial() for placement in tensor.placements)


def _is_rounded(func: Callable[..., Any], result: DTensor) -> bool:
    return func in (Tensor.bfloat16, Tensor.to) and result.dtype == torch.bfloat16
