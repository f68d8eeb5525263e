"""One rank's batches: Lightning's loops around a step, and the plan's run in its place."""

from .backward import BackwardHooks
from .data import count_resumed_batches, group_sampler_of, make_loader_skip_seen
from .fit import Fit
from .lightning_patches import (
    patch_sigterm_handling,
    prevent_distributed_samplers,
    run_backward_in_step,
)
from .model_in_parts import PartedModuleBuilder
from .run_checks import (
    check_run,
    refuse_hooks_reading_shards,
    refuse_sync_batch_norm,
    refusing_several_optimizers,
    refusing_sharded_layers,
)
from .split import Split
from .step_calls import StepCalls
