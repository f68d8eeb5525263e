"""Random numbers that do not depend on how the model is cut.

Each block of each microbatch, with what lies between it and the block before, draws from a seed of
its own: then dropout gives the same numbers for every number of ranks and every schedule, where a
stage's position in one common stream would not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

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
    if torch.accelerator.is_available():
        torch.get_device_module().manual_seed(seed)


def seed_all(seed: int) -> None:
    """Seed torch, numpy and Python."""
    seed_torch(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@contextmanager
def forked_randomness() -> Iterator[None]:
    """Leave every global generator as it was found."""
    python, numpy_state, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    device = torch.get_device_module() if torch.accelerator.is_available() else None
    device_state = device.get_rng_state() if device else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_rng_state(cpu)
        if device:
            device.set_rng_state(device_state)
