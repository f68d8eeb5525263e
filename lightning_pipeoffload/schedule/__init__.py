"""Pipeline schedules as data: built, checked, lowered, simulated and drawn without torch."""

from .actions import (
    ACTIVATION,
    COMPUTE,
    COMPUTE_LANE,
    COPIES,
    FINAL,
    HOST_EFFECTS,
    KINDS,
    MEMORY_EFFECTS,
    NOTHING,
    RECVS,
    RELOADS,
    SENDS,
    TRANSFERS,
    WAITING,
    Action,
    Kind,
    MemoryEffect,
    MemoryLimitError,
    MemoryPart,
    ScheduleError,
)
from .build import DEFAULT_SCHEDULE, SCHEDULES, build, check_name
from .builders.grouped import UNMEASURED
from .candidates import RECOMPUTATIONS, Candidate, PlanOption, best_candidate, options
from .costs import (
    COMPUTE_TIMES,
    Costs,
    compute_seconds,
    copy_ratios,
    estimated_copy_ratio,
    hideable_copy_share,
    layer_train_flops,
    with_copy_ratio,
)
from .families import (
    FAMILIES,
    Recipe,
    build_from_recipe,
    check_limit,
    check_positive_integers,
    check_schedule,
    check_slices,
)
from .make_plan import (
    HostMemoryLimitError,
    Job,
    Plan,
    PlanRequest,
    make_plan,
    score_bound_without_copies,
)
from .messages import (
    OpenReceives,
    PendingSends,
    max_pending_sends,
    recv_before,
    recv_of,
    send_after,
    send_of,
    speculative_actions,
)
from .passes.last_weights import (
    Tail,
    add_final_actions,
    add_final_actions_by_cost,
    postpone_weight_gradients,
    tails,
)
from .passes.offload import OffloadReport, offload_activations, parse_offload_amount
from .passes.transfer import (
    add_transfers,
    as_executed,
    forward_only,
    keep_microbatches,
    lower,
    serialize_microbatches,
    split_every_backward,
    split_fused_backward,
)
from .plan_cache import PlanCache, write_and_prune
from .rank_limits import RankLimits
from .replay import replay
from .schedule import Schedule, accumulates_in_same_order, device_indices, stages_on
from .simulation.arrivals import receives_to_post
from .simulation.memory import (
    memory_changes,
    part_sizes,
    peak_host_memory,
    peak_memory,
    peak_message_memory,
)
from .simulation.simulate import period_bubble, simulate, simulate_steps, steady_period
from .slices import LEAST_TOKENS, Slices, expand_to_stages, slice_ends
from .text import bytes_text, draw, seconds_text, share_text
from .timeline import Event, Timeline
from .validate import validate

# What users import; the other names are for other packages of this one.
__all__ = [
    "COMPUTE",
    "COPIES",
    "HOST_EFFECTS",
    "MEMORY_EFFECTS",
    "SCHEDULES",
    "TRANSFERS",
    "UNMEASURED",
    "Action",
    "Costs",
    "Event",
    "Kind",
    "MemoryEffect",
    "MemoryLimitError",
    "MemoryPart",
    "OffloadReport",
    "Recipe",
    "Schedule",
    "ScheduleError",
    "Slices",
    "Tail",
    "Timeline",
    "accumulates_in_same_order",
    "add_final_actions",
    "add_final_actions_by_cost",
    "add_transfers",
    "as_executed",
    "build",
    "check_name",
    "check_schedule",
    "copy_ratios",
    "draw",
    "estimated_copy_ratio",
    "forward_only",
    "hideable_copy_share",
    "keep_microbatches",
    "lower",
    "memory_changes",
    "offload_activations",
    "parse_offload_amount",
    "part_sizes",
    "peak_host_memory",
    "peak_memory",
    "peak_message_memory",
    "period_bubble",
    "postpone_weight_gradients",
    "receives_to_post",
    "serialize_microbatches",
    "simulate",
    "simulate_steps",
    "slice_ends",
    "split_every_backward",
    "split_fused_backward",
    "steady_period",
    "tails",
    "validate",
    "with_copy_ratio",
]
