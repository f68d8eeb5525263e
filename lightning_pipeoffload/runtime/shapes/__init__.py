"""Tensors without values, which replace tensors of other stages and ranks."""

from .drawing_modules import record_draw
from .held_value import HeldOutput, HeldState, HeldValue
from .kernels_on_zeros import KernelFoundError, KernelsOnZeros, code_of, subclasses_of
from .operations import (
    DRAWS_BY_SHAPE,
    FACTORIES,
    has_known_draw_count,
    has_plain_storage,
    lengths_argument_index,
    written_arguments,
)
from .packed_sequences import pad_packed_on_shapes
from .quantized_weight import (
    SHARDED,
    bytes_on_device,
    copy_quant_state,
    describe_4bit,
    entries_of,
    is_4bit,
    load_packed,
    map_state,
    map_with_quant_state,
    move_weight,
    num_unpacked_values,
    params4bit_arguments,
    quantize_if_4bit,
    quantize_stand_in_if_4bit,
    read_shape_only_quant_state,
    read_state,
    refuse_dtensor_weight,
    refuse_other_quantized,
    scales_of,
    sync_layer_quant_state,
    unpacked_shape,
)
from .remote_gradient import KnownNorms, RemoteGradient
from .remote_tensor import (
    EqualIsSame,
    GradientChanges,
    RemoteTensor,
    remote_read_message,
    remote_subclass_of,
    trunc_normal_on_shapes,
)
from .shape_only import (
    Awaited,
    ShapeOnly,
    has_shape_only,
    shape_only_leaves,
    storage_key,
    storage_of,
    substitute_values,
)
from .shard_origins import recording_shards
from .sharding import (
    OF_SHARD,
    Sharding,
    has_partial_gradient,
    is_shard,
    local_part,
    refuse_dtensor,
    refuse_loss_of_shard,
    refuse_weight_on_shard,
    register_sharding_hooks,
    set_sharding,
    sharding_of,
    unwrap_replicated,
)
from .step_rules import (
    EVERYTHING,
    NO_ALARM,
    RULES,
    AddressNeededError,
    AssumedValues,
    StepRules,
    ValueNeededError,
    describe_origins,
    has_observer,
    is_in_step,
    is_sized_by_values,
)
