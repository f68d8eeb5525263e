"""Hooks of the user's module and callbacks, and the values that they use, over all ranks."""

from .collected_values import CollectedValues
from .hook_forwards import HookForwards
from .sent_values import RemoteOutputs, numbers_in
from .users_hooks import (
    BEFORE_STEPS,
    OF_GRADIENTS,
    find_hooked,
    has_forward_hooks,
    hooks_between_batches,
    refuse_different_callbacks,
    share_gradient_norms,
    users_hooks,
    without_forward_hooks,
    wrap_end_hooks,
    wrap_gradient_hooks,
)
