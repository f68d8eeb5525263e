"""Finds the blocks of a model from the modules that a step calls, in a trace for this purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torchs

from lightning_pipeoffload.runtime.cut.block_chain import BlockChain, chain_from_names
from lightning_pipeoffload.runtime.cut.call_checks import is_in_autograd_function
from lightning_pipeoffload.runtime.cut.call_order import CallOrder
from lightning_pipeoffload.runtime.cut.called_blocks import (
    CalledChains,
    ModuleCall,
    format_blocks_argument,
)
from lightning_pipeoffload.runtime.cut.trace import LongContainerWriteError, StepTrace
from lightning_pipeoffload.runtime.shapes import KernelFoundError, KernelsOnZeros

_MOST_TRIALS = 6


class TrialCuts:
    """Chains at which a step, run by ``call``, could be cut.

    Args:
        module: The user's module.
        device: The device that tensors report.
        kernels: The Functions and modules that the step runs on zeros.
        call: Runs the step.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        kernels: KernelsOnZeros,
        call: Callable[[], Any],
    ) -> None:
        self._module, self._device, self._kernels = module, device, kernels
        self._call = call

    def ranked_chains(self) -> list[list[str]]:
        """Return chains of blocks, by names, that have at least half of the step's work.

        Chains whose blocks are called once come before those with blocks called several times.
        """
        made = self._record_calls()
        candidates: list[list[str]] = []
        for calls in (made.modules_called_once(), made.summed_calls()):
            chains = CalledChains(self._module, calls, made.work)
            candidates += [names for names in chains.ranked_chains() if chains.holds_most(names)]
        return [names for index, names in enumerate(candidates) if names not in candidates[:index]]

    def describe_other_blocks(self, chain: BlockChain, num_stages: int) -> str:
        """Return the ``blocks=...`` argument with which a trial trace of the step succeeds.

        "" if there is none.

        Args:
            chain: The chain with which the step cannot be cut.
            num_stages: The least number of blocks.
        """
        chain.release()
        try:
            made = self._record_calls()
            chains = CalledChains(
                self._module, made.modules_called_once(), made.work, is_whole=False
            )
            proposals = (n for n in chains.ranked_chains() if len(n) >= max(num_stages, 2))
            for names in islice(proposals, _MOST_TRIALS):
                if self._can_cut(names):
                    return format_blocks_argument(self._module, names)
            return ""
        finally:
            chain.intercept()

    def find_call_order(self, chain: BlockChain) -> CallOrder:
        """Return the order in which the step calls the blocks of a chain."""
        made = self._record_calls()
        begun = [(c.begin, i) for i, block in enumerate(chain.blocks) for c in made.calls_of(block)]
        return CallOrder(tuple(index for _, index in sorted(begun)), len(chain))

    def _record_calls(self) -> _ModuleCalls:
        calls = _ModuleCalls(self._module)
        with suppress(Exception):  # what it has called until then can be enough
            self._trace(BlockChain("", {}), calls.recording)
        return calls

    def _can_cut(self, names: Sequence[str]) -> bool:
        chain = chain_from_names(self._module, names)
        chain.intercept()
        try:
            self._trace(chain)
        except Exception:
            return False
        finally:
            chain.release()
        return True

    def _trace(
        self,
        chain: BlockChain,
        recording: Callable[[StepTrace], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        while True:
            trace = StepTrace(self._module, chain, self._device, self._kernels)
            try:
                # What a whole step has written into long containers does not matter here.
                with recording(trace), suppress(LongContainerWriteError):
                    trace.trace(self._call)
            except KernelFoundError:
                continue
            return


class _ModuleCalls:
    """Records the calls of modules in a trace without blocks, all of which is one segment."""

    def __init__(self, module: nn.Module) -> None:
        self._trains = torch.is_grad_enabled()
        self._names = {part: name for name, part in module.named_modules()}

    @contextmanager
    def recording(self, trace: StepTrace) -> Iterator[None]:
        """Record the calls of a trace within the context; forget those of earlier traces."""
        self._trace = trace
        self._calls: dict[str, list[ModuleCall]] = {}
        self._in_functions: set[str] = set()  # which cannot be cut
        self._begun: list[tuple[nn.Module, int, int, int]] = []
        self._count = 0
        before = torchs.register_module_forward_pre_hook(self._begin)
        with before, torchs.register_module_forward_hook(self._end):
            yield

    @property
    def work(self) -> int:
        """All operations of the trace."""
        return self._trace.record.work.forward_flops[0]

    def calls_of(self, part: nn.Module) -> list[ModuleCall]:
        """Return the calls of a module, which may have several names."""
        return self._calls.get(self._names[part], [])

    def modules_called_once(self) -> dict[str, ModuleCall]:
        """Return the calls of modules that are called once."""
        return {
            name: call for name, call in self.summed_calls().items() if len(self._calls[name]) == 1
        }

    def summed_calls(self) -> dict[str, ModuleCall]:
        """Return the first call of each module, with the work of all its calls."""
        return {
            name: ModuleCall(
                calls[0].begin,
                calls[0].end,
                sum(call.work for call in calls),
                any(call.reads_values for call in calls),
                any(call.has_graph for call in calls),
            )
            for name, calls in self._calls.items()
            if name not in self._in_functions
        }

    def _begin(self, part: nn.Module, args: tuple[Any, ...]) -> None:
        self._count += 1
        self._begun.append((part, self._count, *self._work_and_reads()))

    def _end(self, part: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        while self._begun:
            other, begin, work, reads = self._begun.pop()
            if other is part:
                break
        else:
            return
        self._count += 1
        now = self._work_and_reads()
        if part in self._names:
            name = self._names[part]
            has_graph = torch.is_grad_enabled()
            call = ModuleCall(begin, self._count, now[0] - work, now[1] > reads, has_graph)
            self._calls.setdefault(name, []).append(call)
            if self._trains and is_in_autograd_function():
                self._in_functions.add(name)

    def _work_and_reads(self) -> tuple[int, int]:
        return self.work, self._trace.num_assumed
