"""Weight gradients apart from input gradients: deferred by B, computed by W."""

from .calls import BatchedProduct, Convolution, DeferredCall, Linear, MatrixProduct
from .chunked_loss import ChunkCallbacks, chunked_loss
from .kernels import (
    Original,
    deferring_kernels,
    is_deferrable,
    mark_deferrable,
    registered_kernel,
    uses_in,
)
from .node import (
    ANCHOR,
    NO_HOOKS,
    Hooks,
    ReadInput,
    WeightInputKeeper,
    keeper_of,
    save_input_outside_graph,
    saving_hooks,
    trains_parameters,
)
from .queue import (
    AddProduct,
    Fetch,
    WeightGradQueue,
    active_queue,
    add_product_in_float32,
    add_product_to_grad,
    defer_weight_grad,
    has_hooks,
    mark_computed_in_b,
    supports_float32_accumulation,
)
from .regrouping import GradientListener, RegroupedWeightGrads
