"""F, B and W of one stage and microbatch: the user's step, with only one stage's blocks run."""

from .autocast import forget_casts, sharing_casts, without_mha_fastpath
from .checkpoint_replay import patching_checkpoints
from .microbatch import Microbatch, set_indices_and_weights, split_into_slices
from .read_cache import patching_scalar_reads
from .recomputed_block import run_checkpointed
from .stage import StageRunner, backward_mode
from .stage_gradients import StageGradient, SwappedGradients, stage_gradients
from .stage_pass import StageContext
from .step_writes import StepWrites
