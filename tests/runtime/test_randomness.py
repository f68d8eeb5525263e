from contextlib import nullcontext

import numpy as np
import pytest
import torch

from lightning_pipeoffload.runtime import accelerator
from lightning_pipeoffload.runtime.randomness import forked_randomness, mix_seed, seed_all


def test_mixed_seeds_are_the_same_on_every_machine():
    assert mix_seed(1, 2, 3) == 6087047714123848686


def test_an_accelerator_that_is_not_in_use_is_left_alone(monkeypatch):
    monkeypatch.setattr(accelerator, "accelerator_module", lambda: torch.cuda)
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed", seeded.append)
    monkeypatch.setattr(torch.cuda, "get_rng_state", seeded.append)
    with forked_randomness():
        seed_all(1)
    assert not seeded


def numpy_stream():
    return [float(np.random.randn()), *np.random.randint(0, 1 << 30, 700).tolist()]


@pytest.mark.parametrize("num_drawn", [0, 1, 2, 3, 700])
def test_forks_leave_numpys_generator_where_others_have_drawn_between_them(num_drawn):
    def draw_and_fork(forks):
        found = []
        for _ in range(3):
            found += [float(np.random.randn()) for _ in range(num_drawn)]
            with forked_randomness() if forks else nullcontext():
                if forks:
                    np.random.seed(3)
                    np.random.randn()
        return found + numpy_stream()

    np.random.seed(1)
    expected = draw_and_fork(forks=False)
    np.random.seed(1)
    assert draw_and_fork(forks=True) == expected


def test_a_fork_leaves_another_generator_of_numpys():
    plain = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        with forked_randomness():
            np.random.rand()
        found = numpy_stream()
        np.random.set_bit_generator(np.random.PCG64(5))
        assert numpy_stream() == found
    finally:
        np.random.set_bit_generator(plain)
