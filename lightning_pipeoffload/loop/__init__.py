"""One rank's batches: Lightning's loops around a step, and the plan's run in its place."""

from .backward import BackwardHooks
from .data import count_seen, group_sampler_of, skip_seen_batches
from .fit import Fit
from .lightning_patches import BackwardInStep, keep_group_samplers, patch_sigterm_handling
from .model_in_parts import ModelInParts
from .run_checks import (
    check_run,
    refuse_hooks_reading_shards,
    refuse_sync_batch_norm,
    refusing_several_optimizers,
    refusing_sharded_layers,
)
from .split import Split
from .step_calls import StepCalls
