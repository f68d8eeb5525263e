"""The probe: one run of the user's step without values, to learn how it can be cut.

It takes no memory and no arithmetic, and tells, for batches of these shapes, what each block hands
on, which part of the step uses which parameter, and the floating-point operations of each part.

The step is cut at its blocks into **segments**: segment k is what runs after block k-1 up to and
including block k; the last segment is what follows the last block. Segment 0 so holds the
embedding, the last one the head and the loss. With three blocks on two stages::

    step      embedding, block 0 | mask, block 1 | mask, block 2 | head, loss
    segment           0          |       1       |       2       |     3
    stage     [ 0: its rank leaves the step here ] [ 1: comes to the end      ]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from lightning_pipeoffload.runtime.compiled.block_compiler import uncompiled
from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.cut.probe_pass import (
    BeginningPass,
    BlockReached,
    ProbePass,
    RepeatedPass,
)
from lightning_pipeoffload.runtime.cut.probe_result import Probe
from lightning_pipeoffload.runtime.cut.value_log import ValueLog
from lightning_pipeoffload.runtime.randomness import forked_randomness
from lightning_pipeoffload.runtime.shapes.imagined_values import EVERYTHING, Imagined
from lightning_pipeoffload.runtime.shapes.value_needed import ValueNeededError
from lightning_pipeoffload.runtime.users_code.module_snapshot import unchanged
from lightning_pipeoffload.runtime.users_code.sources import Generators, refusing_iterators
from lightning_pipeoffload.runtime.users_code.users_lines import in_brackets, users_line


def probe_step(
    module: nn.Module,
    chain: BlockChain,
    run: Callable[[], Any],
    device: torch.device,
    log: ValueLog | None = None,
    way: Imagined = EVERYTHING,
) -> Probe:
    """Run the user's step once without values.

    Args:
        module: The user's module; it is left as it was.
        chain: Its blocks.
        run: Calls the step on one microbatch.
        device: The device of that microbatch. The module seems to be on it, wherever it is.
        log: What keeps the values that the step has nevertheless.
        way: How to make up the values that blocks ask for.

    Raises:
        ValueError: The step cannot be cut at its blocks; says what it does and where.
        ImaginedError: Something went wrong with values that are made up.
    """
    probing = ProbePass(module, chain, device, log, way)
    result = probing.result
    with probing.telling_of_imagination():
        with looking(module, probing):
            try:
                probing.lead_back(run())
            except ValueNeededError as error:
                if probing.segment < len(chain):
                    raise ValueError(_explain(error, chain, probing.segment)) from None
            except Exception:
                if not probing.num_imagined:
                    raise
            probing.finish()
        probing.check_complete()
    result.flow.is_certain = not probing.num_imagined
    return result


def repeat_step(
    module: nn.Module,
    chain: BlockChain,
    run: Callable[[], Any],
    device: torch.device,
    way: Imagined,
) -> ValueLog:
    """Run a step once more as :func:`probe_step` does, for the values that it has.

    Args:
        module: The user's module; it is left as it was.
        chain: Its blocks.
        run: Calls the step on one microbatch.
        device: The device of that microbatch.
        way: How to make up the values that blocks ask for.
    """
    log = ValueLog()
    probing = RepeatedPass(module, chain, device, log, way)
    with looking(module, probing):
        try:
            run()
        except ValueNeededError:
            pass  # as in the probe
        except Exception:
            if not (probing.result.imagined or probing.num_imagined):
                raise
    return log


def find_sizes(
    module: nn.Module, chain: BlockChain, run: Callable[[], Any], device: torch.device, block: int
) -> tuple[Any, ...]:
    """Return what the shapes of a step depend on, of its microbatch's values.

    Args:
        module: The user's module; it is left as it was.
        chain: Its blocks.
        run: Calls the step on one microbatch.
        device: The device of that microbatch.
        block: The block before which the last such size is.
    """
    probing = BeginningPass(module, chain, device, block)
    # What goes wrong goes wrong in the probe of these sizes too, which explains it.
    with looking(module, probing), suppress(BlockReached, ValueNeededError, Exception):
        run()
    return *probing.sizes.found, probing.arguments


@contextmanager
def looking(module: nn.Module, probing: ProbePass) -> Iterator[None]:
    """Let a step run without values, and without a trace."""
    with ExitStack() as stack:
        stack.enter_context(forked_randomness())
        stack.enter_context(_same_grad_mode())
        stack.enter_context(Generators(module).kept())
        written = stack.enter_context(unchanged(module))
        stack.enter_context(uncompiled())
        stack.enter_context(refusing_iterators(module))
        stack.enter_context(probing.on(module))
        if probing.looks:
            stack.enter_context(probing.writes.watching())
        stack.enter_context(probing.sizes)
        yield
    probing.result.written_in_place |= written
    probing.result.saved_and_written |= written & probing.saved_attributes


@contextmanager
def _same_grad_mode() -> Iterator[None]:
    """Leave inference mode, in which nothing counts writes, but stay without gradients."""
    is_enabled = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(is_enabled):
        yield


def _explain(error: ValueNeededError, chain: BlockChain, segment: int) -> str:
    return (
        f"the step cannot be cut into stages, for only one of them has what it needs before "
        f"{chain.block_name(segment)}: {error}{in_brackets(users_line(error))}; move it behind "
        f"{chain.block_name(len(chain) - 1)}, where the last stage has all values, or compute it "
        f"from the batch"
    )
