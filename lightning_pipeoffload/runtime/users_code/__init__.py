"""State of the user's code other than parameters: attributes, generators, files, Python modules."""

from .attributes import (
    AttributeWatch,
    GlobalWriteError,
    NamedAttribute,
    Placeholder,
    PlaceholderError,
    RemoteValue,
    StepPoint,
    Write,
    record_globals,
    refuse_written_globals,
)
from .replaced_methods import WrappedHook, original_class, subclass_like
from .snapshot import (
    GONE,
    Attribute,
    ContainedValues,
    Fingerprint,
    StepState,
    TensorSnapshot,
    fingerprint,
    fingerprint_if_small,
    is_plain_value,
    is_unchanged,
    is_written,
    private_copy,
    refill,
    restoring_attributes,
    restoring_module,
)
from .sources import (
    REGISTRIES,
    RandomGenerators,
    is_iterator,
    is_random_generator,
    refusing_held_iterators,
    set_generator_state,
    state_of_generator,
)
from .step_call import (
    TRACE,
    CallOnCopies,
    StepCall,
    UsersStep,
    copy_batch,
    copy_shared_tensors,
    fingerprint_batch,
)
from .tensor_slots import Slot, find_slots, swapped
from .users_lines import (
    format_source_line,
    in_brackets,
    is_library_object,
    running_frames,
    running_user_line,
    users_line,
)
