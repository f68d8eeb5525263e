"""What the user's steps do, looked at once for each kind of step and shape of its microbatch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lightning_pipeoffload.runtime.block_chain import BlockChain
from lightning_pipeoffload.runtime.microbatch import shape_signature
from lightning_pipeoffload.runtime.probe import Probe, probe_step

_MOST_PROBES = 64


class StepProbes:
    """The probes of one module's steps, of which the last few are kept.

    Args:
        module: the user's.
        chain: its blocks.
        device: of the microbatches.

    Attributes:
        known: probes by kind of step, mode of the module and shapes.
    """

    def __init__(self, module: nn.Module, chain: BlockChain, device: torch.device) -> None:
        self._module = module
        self._chain = chain
        self._device = device
        self.known: OrderedDict[Any, Probe] = OrderedDict()
        self._first_of_training: Probe | None = None

    def find(
        self, kind: str, part: Any, call: Callable[[], Any], learn: Callable[[Probe], None]
    ) -> Probe:
        """Return what a step does with a microbatch.

        Args:
            kind: of the step.
            part: the microbatch.
            call: calls the step on it.
            learn: is told of a probe that is new.
        """
        key = kind, self._module.training, shape_signature(part)
        if key in self.known:
            self.known.move_to_end(key)
            return self.known[key]
        probe = self.known[key] = probe_step(self._module, self._chain, call, self._device)
        if len(self.known) > _MOST_PROBES:
            self.known.popitem(last=False)
        if self._first_of_training is None and torch.is_grad_enabled():
            self._first_of_training = probe
        learn(probe)
        return probe

    def forget(self) -> None:
        """Look anew: what blocks hand on may need a gradient now, or none."""
        self.known.clear()
        self._first_of_training = None

    def weight_flops(self, segments: Iterable[int]) -> int:
        """Return the operations of the weight gradients of the first training microbatch.

        Args:
            segments: of the step, that count.
        """
        probe = self._first_of_training
        return sum(probe.weight_flops[segment] for segment in segments) if probe is not None else 0
