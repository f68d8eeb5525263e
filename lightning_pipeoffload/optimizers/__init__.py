"""Optimizers that refer to the whole module's parameters and step those of one rank."""

from .host_step import EarlyStep
from .master_weights import MasterWeights
from .optimized_parameters import OptimizedParameters
from .optimizer_snapshot import OptimizerSnapshot, bytes_usable, has_snapshots, is_torchs
from .optimizer_state import (
    GroupNames,
    follow_parameters,
    groups_with,
    load_optimizer_state,
    name_optimizer_state,
    number_optimizer_state,
    plain_layout,
    read_states,
)
from .optimizer_table import may_step_by_bucket, measure_states, refuse_stand_ins
