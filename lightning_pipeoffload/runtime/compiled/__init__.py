"""Compiled regions of a step, whose weight gradients wait for W too."""

from .block_compiler import (
    BlockCompiler,
    check_compile,
    compiled_call,
    install_split,
    is_compiled,
    remove_split,
    uncompiled,
    warn_once,
)
from .products import sharing_compiled_casts
