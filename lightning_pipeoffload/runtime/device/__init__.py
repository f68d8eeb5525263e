"""The device: streams, events, settings of CUDA, and times of a plan's actions on it."""

from .accelerator import (
    CopyError,
    CopyLanes,
    Lane,
    StreamLane,
    accelerator_module,
    initialized_accelerator,
    is_on_device,
    make_lanes,
)
from .cuda_settings import set_cuda_defaults
from .devices import Device, Devices
from .marks import is_profiled, profiler_range, unprofiled
from .timing import ActionTimer, TimedStep, synchronized_time
