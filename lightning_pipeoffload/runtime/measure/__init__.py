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
    measure_costs,
    overhead_of_actions,
    shares_of_slices,
    with_head_in_b,
)
from .device_speed import find_devices, fit_slowness
from .link_speed import (
    CopySpeed,
    answer_latency,
    compare_clocks,
    measure_copy_speed,
    measure_latencies,
    measure_latency,
)
from .live_bytes import LiveBytes
from .shape_memory import measure_shapes
