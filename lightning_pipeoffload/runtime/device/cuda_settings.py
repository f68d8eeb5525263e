"""Settings that CUDA and torch's allocator read when they start, for pipelines.

Settings of the user are not changed.
"""

from __future__ import annotations

import os

import torch

from lightning_pipeoffload.runtime.device.accelerator import initialized_accelerator

_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def set_cuda_defaults(device: torch.device) -> None:
    """Choose settings for a CUDA device that this process has not used yet."""
    if device.type != "cuda" or initialized_accelerator() is not None:
        return
    # A pipeline with replicas and offload has some 12 streams, and torch's default is 8 queues.
    os.environ.setdefault(_QUEUES, "32")
    if not any(os.environ.get(name) for name in _ALLOCATOR):
        # The allocator gives such memory back without a wait for the device, and so for receives.
        # Private: what the environment says may have been read already.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
