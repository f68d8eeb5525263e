"""State of the user's code other than parameters: attributes, generators, files, Python modules."""

from .attributes import (
    AttributeWatch,
    GlobalWriteError,
    Placeholder,
    PlaceholderError,
    RemoteValue,
    StepPoint,
    Variable,
    Write,
    record_globals,
    refuse_written_globals,
)
from .replaced_methods import WrappedHook, own_class, subclass_like
from .snapshot import (
    GONE,
    Attribute,
    Fingerprint,
    Parts,
    StepState,
    TensorValues,
    fingerprint,
    is_plain_value,
    is_unchanged,
    is_written,
    private_copy,
    refill,
    restoring_module,
    short_fingerprint,
    unchanged,
)
from .sources import (
    REGISTRIES,
    Generators,
    is_generator,
    is_iterator,
    refusing_iterators,
    set_generator_state,
    state_of_generator,
)
from .step_call import (
    TRACE,
    CallOnCopies,
    StepCall,
    UsersStep,
    copy_batch,
    fingerprint_batch,
    without_shared,
)
from .tensor_slots import Slot, find_slots, swapped
from .users_lines import calling_line, in_brackets, is_opaque, line_of, running_frames, users_line
