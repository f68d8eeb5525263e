"""Random numbers that do not depend on how the model is cut.

Each block of each microbatch, with the code between it and the block before, draws from a seed of
its own: so dropout draws the same numbers for every number of ranks and every schedule, as it would
not from one common stream.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lightning_pipeoffload.runtime.device import accelerator_module, initialized_accelerator

_MASK = (1 << 64) - 1


def mix_seed(*parts: int) -> int:
    """Mix integers into one seed of 63 bits (the finalizer of splitmix64, over a running sum)."""
    (seed,) = mix_seeds(parts[:-1], parts[-1:])
    return seed


def mix_seeds(parts: Sequence[int], lasts: Iterable[int]) -> list[int]:
    """Return :func:`mix_seed` of ``parts`` and each of ``lasts``."""
    seeds = []
    for last in lasts:
        state = 0x9E3779B97F4A7C15
        for part in (*parts, last):
            state = (state ^ part) * 0xBF58476D1CE4E5B9 & _MASK
            state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
            state ^= state >> 31
        seeds.append(state >> 1)
    return seeds


def seed_torch(seed: int) -> None:
    """Seed torch's generators of the CPU and of the accelerator in use."""
    torch.default_generator.manual_seed(seed)
    accelerator = initialized_accelerator()
    if accelerator:
        accelerator.manual_seed(seed)


def segment_seeder(outside_torch: bool) -> Callable[[int], Any]:
    """Return a function that seeds torch's generators, and numpy's and Python's on request."""
    if outside_torch:
        return seed_all
    return seed_torch if initialized_accelerator() else torch.default_generator.manual_seed


def seed_all(seed: int) -> None:
    """Seed torch, numpy and Python."""
    seed_torch(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def has_drawn_outside_torch(seed: int) -> bool:
    """Whether numpy's or Python's generator was used since ``seed_all(seed)``; seeds them again."""
    drawn = random.random(), np.random.rand()
    seed_all(seed)
    return drawn != (random.random(), np.random.rand())


@contextmanager
def forked_randomness() -> Iterator[None]:
    """Restore the state of every global generator after the context."""
    before = RandomStateSnapshot()
    try:
        yield
    finally:
        before.restore()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed every global generator, and restore its state after the context."""
    with forked_randomness():
        seed_all(seed)
        yield


def generator_state(device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


@contextmanager
def replayed_generator(device: torch.device, state: torch.Tensor) -> Iterator[None]:
    """Set the device generator to an earlier state within the context."""
    before = generator_state(device)
    _set_generator(device, state)
    try:
        yield
    finally:
        _set_generator(device, before)


def _set_generator(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


class RandomStateSnapshot:
    """The states of all global generators when this was made.

    Args:
        state: Those of another one, its ``vars()``; None: the present ones.
    """

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        if state is not None:
            self.__dict__.update(state)
            return
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)  # half the time of the other form
        self._cpu = torch.get_rng_state()
        accelerator = initialized_accelerator()
        self._device_state = accelerator.get_rng_state() if accelerator else None

    def restore(self) -> None:
        random.setstate(self._python)
        inner = self._numpy["state"]
        if isinstance(inner.get("key"), np.ndarray):
            # numpy reads its 624 numbers one by one, from a list in a twentieth of the time.
            inner["key"] = inner["key"].tolist()
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        if self._device_state is not None and initialized_accelerator():
            accelerator_module().set_rng_state(self._device_state)


def are_same_states(one: Any, other: Any) -> bool:
    """Whether the states of the same generators are equal: nothing has drawn in between."""
    pairs = [(one, other)]
    while pairs:
        one, other = pairs.pop()
        if isinstance(one, dict):
            pairs += zip(one.values(), map(other.__getitem__, one), strict=True)
        elif isinstance(one, list):
            pairs += zip(one, other, strict=False)
        elif isinstance(one, torch.Tensor | np.ndarray):
            if not (one == other).all():
                return False
        elif one != other:
            return False
    return True


def draw_seed() -> int:
    """Draw a seed from torch's global generator, as iterating over a shuffled loader does."""
    return int(torch.empty((), dtype=torch.int64).random_())
