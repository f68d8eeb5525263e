"""Random numbers that do not depend on how the model is cut.

Each block of each microbatch, with the code between it and the block before, draws from a seed of
its own: so dropout draws the same numbers for every number of ranks and every schedule, as it would
not from one common stream.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lightning_pipeoffload.runtime.accelerator import accelerator_in_use, accelerator_module

_MASK = (1 << 64) - 1


def mix_seed(*parts: int) -> int:
    """Mix integers into one seed of 63 bits (the finalizer of splitmix64, over a running sum)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ part) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


def seed_torch(seed: int) -> None:
    """Seed torch's generators of the CPU and of the accelerator in use."""
    torch.default_generator.manual_seed(seed)
    accelerator = accelerator_in_use()
    if accelerator:
        accelerator.manual_seed(seed)


def seed_all(seed: int) -> None:
    """Seed torch, numpy and Python."""
    seed_torch(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def has_drawn_since(seed: int) -> bool:
    """Whether numpy's or Python's generator was used since ``seed_all(seed)``; seeds them again."""
    drawn = random.random(), np.random.rand()
    seed_all(seed)
    return drawn != (random.random(), np.random.rand())


@contextmanager
def forked_randomness() -> Iterator[None]:
    """Restore every global generator at the end."""
    found = RandomnessReplay()
    try:
        yield
    finally:
        found.restore()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed every global generator inside, and restore it at the end."""
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
    """Give the device's generator an earlier state inside."""
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


class _NumpyGenerator:
    """The state of numpy's global generator.

    numpy takes 30 us to read it and as long to set it, a word at a time. A step forks it twice, so
    where its memory is as it was when it was read last, the state is known, and its memory is
    copied back.
    """

    _NUM_BYTES = 625 * 4  # of a Mersenne twister: 624 words and a position

    def __init__(self) -> None:
        self._memory = b""
        self._state: Any = None

    def state(self) -> tuple[bytes, Any]:
        """Return its memory, empty if that is not known, and its state."""
        address = self._address()
        memory = ctypes.string_at(address, self._NUM_BYTES) if address else b""
        if not memory or memory != self._memory or self._state["has_gauss"]:
            # Of two forms the one that takes half the time.
            self._memory, self._state = memory, np.random.get_state(legacy=False)
        return memory, self._state

    def put_back(self, memory: bytes, state: Any) -> None:
        """Give it a state that it had."""
        address = self._address()
        if not memory or not address or state["has_gauss"]:
            np.random.set_state(state)
            return
        np.random.seed(0)  # it has no normal number left over from the last pair
        ctypes.memmove(address, memory, self._NUM_BYTES)
        self._memory, self._state = memory, state

    @staticmethod
    def _address() -> int:
        bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined] # exported at run time
        return bits.ctypes.state_address if type(bits) is np.random.MT19937 else 0


_NUMPY = _NumpyGenerator()


class RandomnessReplay:
    """The states of all global generators when this was made."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = _NUMPY.state()
        self._cpu = torch.get_rng_state()
        accelerator = accelerator_in_use()
        self._device_state = accelerator.get_rng_state() if accelerator else None

    def restore(self) -> None:
        random.setstate(self._python)
        _NUMPY.put_back(*self._numpy)
        torch.set_rng_state(self._cpu)
        if self._device_state is not None:
            accelerator_module().set_rng_state(self._device_state)


def draw_seed() -> int:
    """Draw a seed from torch's global generator, as iterating over a shuffled loader does."""
    return int(torch.empty((), dtype=torch.int64).random_())
