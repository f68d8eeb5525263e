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
from .candidates import RECOMPUTATIONS, Candidate, Option, best_of, options
from .costs import (
    COMPUTE_TIMES,
    Costs,
    copy_ratios,
    estimated_copy_ratio,
    free_share,
    layer_flops,
    with_copy_ratio,
)
from .families import FAMILIES, Recipe, accept, build_by, check_limit, check_sizes, check_slices
from .make_plan import HostShortageError, Job, Plan, PlanRequest, least_score, make_plan
from .messages import (
    OpenReceives,
    PendingSends,
    actions_ahead,
    most_pending,
    recv_before,
    recv_of,
    send_after,
    send_of,
)
from .passes.last_weights import (
    Tail,
    add_final_actions,
    postpone_weights,
    tails,
    with_final_actions,
)
from .passes.offload import OffloadReport, offload_activations, offload_share
from .passes.transfer import (
    add_transfers,
    as_executed,
    forward_only,
    keep_microbatches,
    lower,
    one_at_a_time,
    split_every_backward,
    split_fused_backward,
)
from .plan_cache import PlanCache, store_text
from .rank_limits import RankLimits
from .replay import replay
from .schedule import Schedule, places_of, stages_on, sums_alike
from .simulation.arrivals import expected_during
from .simulation.memory import (
    memory_changes,
    part_sizes,
    peak_host_memory,
    peak_memory,
    peak_message_memory,
)
from .simulation.simulate import period_bubble, simulate, simulate_steps, steady_period
from .slices import LEAST_TOKENS, Slices, cut_positions, of_every_stage
from .text import bytes_text, draw, seconds_text, share_text
from .timeline import Event, Timeline
from .validate import validate

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
    "OffloadReport",
    "MemoryPart",
    "Recipe",
    "Schedule",
    "ScheduleError",
    "Slices",
    "Tail",
    "Timeline",
    "accept",
    "add_final_actions",
    "add_transfers",
    "as_executed",
    "build",
    "check_name",
    "copy_ratios",
    "cut_positions",
    "draw",
    "estimated_copy_ratio",
    "expected_during",
    "forward_only",
    "free_share",
    "keep_microbatches",
    "lower",
    "memory_changes",
    "offload_activations",
    "offload_share",
    "one_at_a_time",
    "part_sizes",
    "peak_host_memory",
    "peak_memory",
    "peak_message_memory",
    "period_bubble",
    "simulate",
    "simulate_steps",
    "split_every_backward",
    "split_fused_backward",
    "steady_period",
    "sums_alike",
    "postpone_weights",
    "tails",
    "with_final_actions",
    "validate",
    "with_copy_ratio",
]
