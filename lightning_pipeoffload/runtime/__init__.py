"""One rank of a pipeline in torch: cuts the user's module into stages and executes a plan."""

from .active_settings import ACTIVE_SETTINGS
from .contexts import NOTHING, combine_contexts, without_garbage_collection
from .late_values import is_on_accelerator, start_host_copy
from .leaves import (
    leaves_of,
    map_in_place,
    map_operands,
    map_output,
    output_leaves,
    output_tensors,
    tensors_in,
)
from .payload import (
    BlockOutput,
    ReceivedGradients,
    TensorSpec,
    dense_stride,
    gradients_to_send,
    start_stage_graph,
)
from .randomness import (
    RandomStateSnapshot,
    are_same_states,
    draw_seed,
    forked_randomness,
    generator_state,
    has_drawn_outside_torch,
    mix_seed,
    mix_seeds,
    replayed_generator,
    seed_all,
    seed_torch,
    seeded,
    segment_seeder,
)
from .replaced import PATCHES, replaced
from .stored_tensor import StoredTensor, read_stored, value_of
