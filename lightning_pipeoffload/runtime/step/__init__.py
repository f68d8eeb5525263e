"""F, B and W of one stage and microbatch: the user's step, with only one stage's blocks run."""

from .autocast import forget_casts, sharing_casts, without_fused_layers
from .checkpoint_replay import wrapping_checkpoints
from .microbatch import Microbatch, in_slices, set_plan_indices
from .read_cache import caching_reads
from .recomputed_block import run_checkpointed
from .stage import StageRunner, backward_mode
from .stage_gradients import StageGradient, SwappedGradients, stage_gradients
from .stage_pass import StageContext
from .step_writes import StepWrites
