"""Compiled regions of a step, whose weight gradients wait for W too."""

from .block_compiler import (
    BlockCompiler,
    check_compile,
    compiled_call,
    is_compiled,
    splitting_regions,
    uncompiled,
    warn_once,
)
from .products import sharing_compiled_casts
