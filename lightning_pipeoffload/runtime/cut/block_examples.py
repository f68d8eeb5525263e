"""Calls of blocks as training makes them, but for the values: found by a run without any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map  # private: see runtime/leaves
from typing_extensions import override

from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.cut.probe import looking
from lightning_pipeoffload.runtime.cut.probe_pass import RepeatedPass
from lightning_pipeoffload.runtime.shapes.imagined_values import EVERYTHING
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.shapes.value_needed import ValueNeededError


@dataclass(frozen=True)
class BlockExample:
    """One call of a block.

    Attributes:
        arguments: Its arguments, with functions that make tensors in place of those without values.
        autocast: The dtype that autocast would compute in; None: it is off.
        device_type: The type of device that autocast is for.
    """

    arguments: Any
    autocast: torch.dtype | None
    device_type: str

    @contextmanager
    def called(self) -> Iterator[Any]:
        """Return the arguments with zeros for values; inside, autocast is as it was."""
        is_on = self.autocast is not None
        with torch.autocast(self.device_type, self.autocast, enabled=is_on):
            yield tree_map(_make_zeros, self.arguments)


@dataclass(frozen=True)
class _Zeros:
    """Makes zeros in place of a tensor without values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def __call__(self) -> Tensor:
        zeros = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return zeros.requires_grad_(self.requires_grad)


def _make_zeros(leaf: Any) -> Any:
    return leaf() if isinstance(leaf, _Zeros) else leaf


class _CallsPass(RepeatedPass):
    """Runs the step for the calls of its blocks."""

    def __init__(self, module: nn.Module, chain: BlockChain, device: torch.device) -> None:
        super().__init__(module, chain, device, None, EVERYTHING)
        self._device = device
        self.found: dict[int, BlockExample] = {}

    @override
    def call_block(self, index: int, call: Callable[[], Any], arguments: Any) -> Any:
        kind = self._device.type
        is_on = torch.is_autocast_enabled(kind)
        autocast = torch.get_autocast_dtype(kind) if is_on else None
        self.found[index] = BlockExample(tree_map(self._describe, arguments), autocast, kind)
        return super().call_block(index, call, arguments)

    def _describe(self, leaf: Any) -> Any:
        if not isinstance(leaf, ShapeOnly):
            return leaf
        return _Zeros(leaf.shape, leaf.dtype, self._device, leaf.requires_grad)


def find_examples(
    module: nn.Module, chain: BlockChain, run: Callable[[], Any], device: torch.device
) -> dict[int, BlockExample]:
    """Return a call of each block.

    Args:
        module: The user's module; it is left as it was.
        chain: Its blocks.
        run: Calls the step on one microbatch.
        device: The device of that microbatch.
    """
    calls = _CallsPass(module, chain, device)
    with looking(module, calls):
        try:
            run()
        except ValueNeededError:
            pass  # behind the blocks
        except Exception:
            if not calls.num_imagined:
                raise
    return calls.found
