"""One rank's batches: Lightning's loops around a step, and the plan's run in its place."""

from .backward import BackwardHooks
from .data import count_seen, group_sampler_of, leave_out_seen
from .fit import Fit
from .lightning_patches import BackwardInStep, leave_group_samplers, stop_without_waiting
from .model_in_parts import ModelInParts
from .run_checks import (
    check_run,
    explaining_optimizers,
    explaining_shards,
    refuse_readers_of_shards,
    refuse_sync_batch_norm,
)
from .split import Split
from .step_calls import StepCalls
