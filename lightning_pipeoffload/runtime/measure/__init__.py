"""Measured costs of stages, copies and messages on this machine."""

from .block_costs import (
    ActionOverhead,
    BlockMeasurement,
    RankCosts,
    SampledCut,
    SliceCosts,
    StageCosts,
    costs_of_blocks,
    costs_of_pipelines,
    costs_of_slice,
    costs_of_stages,
    cut_by_costs,
    join_costs,
    median_costs,
    move_head_w_to_b,
    overhead_of_actions,
    shares_of_slices,
)
from .device_speed import fit_slowness, measure_devices
from .link_speed import (
    CopySpeed,
    echo_messages,
    measure_clock_offsets,
    measure_copy_speed,
    measure_latencies,
    measure_latency,
)
from .live_bytes import LiveBytes
from .shape_memory import measure_saved_memory
