"""Finds the ``blocks=`` with which a step can be cut, for messages that refuse another chain.

The step is traced once more to see which modules it calls, and once with each proposal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torchs

from lightning_pipeoffload.runtime.cut.block_chain import BlockChain, find_chain
from lightning_pipeoffload.runtime.cut.other_blocks import as_argument, candidates
from lightning_pipeoffload.runtime.cut.trace import LongWriteError, StepTrace
from lightning_pipeoffload.runtime.shapes.kernels_on_zeros import (
    KernelFoundError,
    KernelsOnZeros,
)

_MOST_TRIALS = 6


def propose_traced(
    module: nn.Module,
    chain: BlockChain,
    device: torch.device,
    kernels: KernelsOnZeros,
    call: Callable[[], Any],
    num_stages: int,
) -> str:
    """Return ``blocks=...`` that a step, run by ``call``, can be cut with; "" if none is found.

    Args:
        module: The user's module.
        chain: The chain with which it cannot.
        device: The device that tensors report.
        kernels: What the step runs on zeros.
        call: Runs the step.
        num_stages: The least number of blocks.
    """
    trace = partial(_trace, module, device=device, kernels=kernels, call=call)
    chain.release()
    try:
        calls = _find_calls(module, trace)
        proposals = (
            names for names in candidates(module, calls) if len(names) >= max(num_stages, 2)
        )
        for names in islice(proposals, _MOST_TRIALS):
            if _can_cut(module, names, trace):
                return as_argument(module, names)
        return ""
    finally:
        chain.intercept()


def _trace(
    module: nn.Module,
    chain: BlockChain,
    device: torch.device,
    kernels: KernelsOnZeros,
    call: Callable[[], Any],
) -> None:
    # What a step writes into long containers does not matter here.
    with suppress(KernelFoundError), suppress(LongWriteError):
        StepTrace(module, chain, device, kernels).trace(call)
        return
    _trace(module, chain, device, kernels, call)


def _find_calls(module: nn.Module, trace: Callable[[BlockChain], None]) -> dict[str, int]:
    """Return the position of the call of each module that a step calls once, with gradients."""
    names = {part: name for name, part in module.named_modules()}
    calls: dict[str, list[int]] = {}
    count = 0

    def note(part: nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal count
        count += 1
        if part in names:
            # Two entries of what cannot be cut.
            found = [count] if torch.is_grad_enabled() else [count, count]
            calls.setdefault(names[part], []).extend(found)

    hook = torchs.register_module_forward_pre_hook(note)
    with hook, suppress(Exception):  # what it has called until then can be enough
        trace(BlockChain("", {}))
    return {name: found[0] for name, found in calls.items() if len(found) == 1}


def _can_cut(module: nn.Module, names: Sequence[str], trace: Callable[[BlockChain], None]) -> bool:
    chain = find_chain(module, names)
    chain.intercept()
    try:
        trace(chain)
    except Exception:
        return False
    finally:
        chain.release()
    return True
