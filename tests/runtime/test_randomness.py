import torch

from lightning_pipeoffload.runtime import forked_randomness, mix_seed, seed_all
from lightning_pipeoffload.runtime.device import accelerator


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
