"""What goes from block to block in one run of the step, and what goes beside."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import torch

from lightning_pipeoffload.runtime.payload import BlockOutput, TensorSpec


class Port(NamedTuple):
    """Where a step makes a value.

    Attributes:
        segment: The segment of the step; the output of block k belongs to segment k + 1.
        call: Number of the call of a torch function in it, from 1 on; 0 is the block before.
        place: Its place among the tensors of what the call returned.
    """

    segment: int
    call: int
    place: int


@dataclass
class Crossing:
    """A value that goes from one segment to later ones beside the payload.

    Attributes:
        port: Where the value is made; None: in a way that cannot be followed.
        made_in: Segment that computes it.
        used_in: Last segment that needs it.
        shape: The shape of the tensor.
        dtype: The dtype of the tensor.
        trains_from: Segment from which on it requires a gradient; None: never.
        origins: What it is computed from, by name.
        line: The line of the user's code that needs it; "" if none is found.
        digest: A number made of the calls in the segment up to the one that makes it.
        led_back: Segments between which the loss leads back to it; None: all that there are.
    """

    port: Port | None
    made_in: int
    used_in: int
    shape: torch.Size
    dtype: torch.dtype
    trains_from: int | None
    origins: frozenset[str]
    line: str
    digest: int = 0
    led_back: list[tuple[int, int]] | None = None

    def crosses(self, block: int) -> bool:
        """Whether it goes over the cut before ``block``."""
        return self.made_in < block <= self.used_in

    def spec_before(self, block: int) -> TensorSpec:
        """Describe it as it goes over the cut before ``block``."""
        trains = self.trains_from is not None and self.trains_from < block
        return TensorSpec(self.shape, self.dtype, trains, trains and self._is_led_back_over(block))

    def _is_led_back_over(self, block: int) -> bool:
        return self.led_back is None or any(made < block <= used for made, used in self.led_back)


@dataclass
class Flow:
    """All that goes from block to block in one run of the step.

    Attributes:
        outputs: The outputs of each block.
        crossings: What goes beside them.
        opened: Blocks out of which a hook or an attribute lets a value that is used behind them;
            such a block has to run shape-only where another stage has it.
        starts_backward: Whether the step starts a backward itself, of which nothing may wait for W.
        is_certain: Whether no value had to be made up behind the blocks, which might decide to call
            them again.
        draws_beside_torch: Whether the step draws from numpy's or Python's global generator.
    """

    outputs: list[BlockOutput] = field(default_factory=list)
    crossings: list[Crossing] = field(default_factory=list)
    opened: set[int] = field(default_factory=set)
    starts_backward: bool = False
    is_certain: bool = True
    draws_beside_torch: bool = False

    def __post_init__(self) -> None:
        self._over: dict[int, list[Crossing]] = {}
        self._payloads: dict[int, list[TensorSpec]] = {}

    def carried_over(self, block: int) -> list[Crossing]:
        """List what goes beside the payload over the cut before ``block``."""
        if block not in self._over:
            found = [(c.port, c) for c in self.crossings if c.port and c.crosses(block)]
            self._over[block] = [crossing for _, crossing in sorted(found, key=itemgetter(0))]
        return self._over[block]

    def payload_over(self, block: int) -> list[TensorSpec]:
        """Describe all tensors that go over the cut before ``block``."""
        if block not in self._payloads:
            carried = [crossing.spec_before(block) for crossing in self.carried_over(block)]
            self._payloads[block] = [*self.outputs[block - 1].payload, *carried]
        return self._payloads[block]
