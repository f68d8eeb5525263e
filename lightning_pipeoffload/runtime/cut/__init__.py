"""Cutting a user's step into stages: the trace, the partition, the refusals."""

from .block_chain import BlockChain, Running, StageExit, chain_of_calls, find_chain, first_chain
from .block_classes import classes_of_makes, describe_blocks, find_alike_saving, find_classes
from .call_checks import CallsError, checkpoint_around, is_in_function, needs_all_blocks
from .call_order import CallOrder
from .called_blocks import as_argument, inner_blocks
from .carried_values import CarriedValues, mark_slots
from .checks import (
    SKIP_A_BATCH,
    check_recompute_full,
    check_shared_weights,
    check_slices,
    check_step,
    impossible_cuts,
    loss_in,
    recompute_risk,
)
from .device_reads import ReadObserver, ReadPlace
from .loss_terms import Terms
from .partition import (
    ANY_ROOM,
    Cut,
    CutSettings,
    Room,
    SegmentCosts,
    SegmentUses,
    Stage,
    costs_by_size,
    cut,
    estimate_costs,
    find_segments,
    stages_with,
)
from .record import StageRecord, StepRecord
from .remote_values import (
    ModuleCopies,
    absent_in,
    explain_absent,
    is_tracked_copy,
    load_quantization,
    make_real,
    remove_complete_hooks,
)
from .split_module import SplitModule
from .step_records import StepRecords
from .trace import StepTrace
