"""Saved tensors of a rank between F, B and W: counted, offloaded to the host, recomputed."""

from .host_memory import (
    STAGING_BYTES,
    HostBudget,
    HostMemory,
    HostMemoryError,
    MachineMemory,
    gradient_bytes,
    machine_memory,
    slab_bytes,
    staging_bytes,
)
from .recompute import CheapRecompute, check_recompute
from .saved_memory import BytesForLaterSlices, SavedMemory
from .saved_tensor import Saved, SavedTensor
from .stage_store import ActivationStore, HeldBytes, HostBytes, OffloadSettings, storage_address
