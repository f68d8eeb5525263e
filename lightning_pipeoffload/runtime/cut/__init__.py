"""Cutting a user's step into stages: the trace, the partition, the refusals."""

from .block_chain import (
    ActiveStepRun,
    BlockChain,
    StageExit,
    chain_from_names,
    default_chain,
    find_chain,
)
from .block_classes import classify_blocks, classify_by_structure, digest_blocks, find_alike_blocks
from .call_checks import (
    CallsError,
    describe_required_calls,
    is_in_autograd_function,
    running_checkpoint,
)
from .call_order import CallOrder
from .called_blocks import format_blocks_argument, inner_blocks
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
    NO_MEMORY_LIMITS,
    Cut,
    CutSettings,
    SegmentCosts,
    SegmentUses,
    Stage,
    StageMemoryLimits,
    costs_by_size,
    cut,
    estimate_costs,
    find_segment_uses,
    stage_indices_running,
)
from .record import StageRecord, StepRecord
from .remote_values import (
    ModuleCopies,
    find_remote_slots,
    format_absent_error,
    is_tracked_copy,
    load_4bit_weights,
    materialize_slot,
    remove_complete_hooks,
)
from .split_module import SplitModule
from .step_records import StepRecords
from .trace import StepTrace
