"""Compiled regions of a step, whose weight gradients wait for W too."""

from .block_compiler import (
    BlockCompiler,
    check_compile,
    compiled_call,
    force_eager,
    is_compiled,
    splitting_regions,
    warn_once,
)
from .products import sharing_compiled_casts
