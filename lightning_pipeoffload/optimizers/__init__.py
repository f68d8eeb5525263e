"""Optimizers that refer to the whole module's parameters and step those of one rank."""

from .host_step import EarlyStep
from .master_weights import MasterWeights
from .optimized_parameters import OptimizedParameters
from .optimizer_snapshot import (
    OptimizerSnapshot,
    bytes_usable,
    is_torch_optimizer,
    supports_snapshot,
)
from .optimizer_state import (
    GroupNames,
    load_optimizer_state,
    move_state_to_parameters,
    name_optimizer_state,
    number_optimizer_state,
    plain_state_dict,
    read_stored_states,
    replace_group_params,
)
from .optimizer_table import estimate_state_bytes, may_step_by_bucket, refuse_stand_ins
