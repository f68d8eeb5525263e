"""Pipeline schedules as data: built, checked, lowered, simulated and drawn without torch."""

from .actions import (
    COMPUTE,
    COPIES,
    HOST_EFFECTS,
    MEMORY_EFFECTS,
    TRANSFERS,
    Action,
    Kind,
    MemoryEffect,
    MemoryLimitError,
    MemoryPart,
    ScheduleError,
)
from .build import SCHEDULES, build, check_name
from .builders.grouped import UNMEASURED
from .costs import Costs, copy_ratios, estimated_copy_ratio, free_share, with_copy_ratio
from .families import Recipe, accept
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
from .schedule import Schedule, sums_alike
from .simulation.arrivals import expected_during
from .simulation.memory import (
    memory_changes,
    part_sizes,
    peak_host_memory,
    peak_memory,
    peak_message_memory,
)
from .simulation.simulate import period_bubble, simulate, simulate_steps, steady_period
from .slices import Slices, cut_positions
from .text import draw
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

from .actions import ACTIVATION, COMPUTE_LANE, FINAL, KINDS, NOTHING, RECVS, RELOADS, SENDS, WAITING
from .build import DEFAULT_SCHEDULE
from .candidates import RECOMPUTATIONS, Candidate, Option, best_of, options
from .costs import COMPUTE_TIMES, layer_flops
from .families import FAMILIES, build_by, check_limit, check_sizes, check_slices
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
from .plan_cache import PlanCache, store_text
from .rank_limits import RankLimits
from .replay import replay
from .schedule import places_of, stages_on
from .slices import LEAST_TOKENS, of_every_stage
from .text import bytes_text, seconds_text, share_text
