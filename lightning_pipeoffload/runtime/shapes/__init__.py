"""Tensors without values, which replace tensors of other stages and ranks."""

from .drawing_modules import record_draw
from .held_value import HeldOutput, HeldState, HeldValue
from .kernels_on_zeros import KernelFoundError, KernelsOnZeros, code_of, subclasses_of
from .operations import (
    DRAWS_BY_SHAPE,
    FACTORIES,
    draws_by_shape,
    is_plain,
    lengths_place,
    written_arguments,
)
from .packed_sequences import padding_anywhere
from .quantized_weight import (
    SHARDED,
    bytes_on_device,
    carry_quantization,
    copy_state,
    describe_4bit,
    entries_of,
    forget_state,
    full_shape,
    is_4bit,
    load_packed,
    map_state,
    move_weight,
    num_values,
    options_of,
    quantize,
    read_shapes,
    read_state,
    refuse_other_quantized,
    refuse_shard,
    scales_of,
    with_state,
)
from .remote_gradient import KnownSize, RemoteGradient
from .remote_tensor import (
    EqualIsSame,
    GradientChanges,
    RemoteTensor,
    drawing_anywhere,
    explain_remote,
    remote_subclass_of,
)
from .shape_only import (
    Awaited,
    ShapeOnly,
    give_values,
    has_shapes,
    memory_of,
    shape_only_leaves,
    storage_of,
)
from .shard_origins import recording_shards
from .sharding import (
    OF_SHARD,
    Sharding,
    has_gradient_in_parts,
    is_shard,
    keep_in_state,
    local_part,
    refuse_dtensor,
    refuse_loss_of_shard,
    refuse_weight_on_shard,
    set_sharding,
    sharding_of,
    whole_value,
)
from .step_rules import (
    EVERYTHING,
    NO_ALARM,
    RULES,
    AddressNeededError,
    AssumedValues,
    StepRules,
    ValueNeededError,
    are_observed,
    describe_origins,
    is_in_step,
    is_sized_by_values,
)
