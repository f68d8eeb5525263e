"""What is set before CUDA starts, and what a user has set."""

import os

import pytest
import torch

from lightning_pipeoffload.runtime.device import cuda_settings, set_cuda_defaults

QUEUES, ALLOCATOR = "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF"


@pytest.mark.parametrize(
    ("given", "device", "in_use", "queues", "settings"),
    [
        ({}, "cuda", None, "32", ["expandable_segments:True"]),
        ({QUEUES: "16", ALLOCATOR: "backend:native"}, "cuda", None, "16", []),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "cuda", None, "32", []),
        ({}, "cuda", torch.cuda, None, []),  # CUDA has read them
        ({}, "cpu", None, None, []),
    ],
)
def test_what_the_user_has_set_stays(monkeypatch, given, device, in_use, queues, settings):
    found = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.append)
    monkeypatch.setattr(cuda_settings, "initialized_accelerator", lambda: in_use)
    for name in (QUEUES, ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    set_cuda_defaults(torch.device(device))
    assert (os.environ.get(QUEUES), found) == (queues, settings)
    monkeypatch.delenv(QUEUES, raising=False)
