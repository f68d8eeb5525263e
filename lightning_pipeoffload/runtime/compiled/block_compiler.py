"""Compiles blocks, and says how they may be compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule  # private: what torch.compile(module) returns
from torch._dynamo.exc import TorchDynamoException  # private: of what does not compile

from lightning_pipeoffload.runtime.compiled.ahead import compiling_ahead
from lightning_pipeoffload.runtime.compiled.backends import (
    UNCOMPILED,
    install_split,
    remove_split,
    say,
)
from lightning_pipeoffload.runtime.randomness import forked_randomness
from lightning_pipeoffload.runtime.users_code.module_snapshot import unchanged

Compile = bool | Mapping[str, Any]
CUDA_GRAPHS = (
    "is compiled with CUDA graphs, which own their outputs, while a pipeline has several "
    'microbatches in flight; use mode="max-autotune-no-cudagraphs", or none'
)


class BlockCompiler:
    """Compiles the blocks that their owner has not compiled, and splits what is compiled.

    Args:
        module: The user's module.
        blocks: Its blocks.
        compile: Whether to compile them, or the arguments of ``torch.compile``.

    Raises:
        ValueError: The owner has compiled a part as a pipeline cannot run it.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module], compile: Compile) -> None:
        check_compiled_parts(module)
        self._all = blocks
        self._arguments = compile if isinstance(compile, Mapping) else {}
        self._blocks = [] if compile is False else [b for b in blocks if compiled_call(b) is None]

    def compile(self) -> None:
        """Compile them at their first calls, and split regions; again is harmless."""
        install_split()
        for block in self._blocks:
            if compiled_call(block) is None:
                block.compile(**self._arguments)

    @property
    def has_work(self) -> bool:
        """Whether any block is compiled, by its owner or here."""
        return any(map(is_compiled, self._all))

    def compile_ahead(self, block: nn.Module, run: Callable[[], Any]) -> None:
        """Compile a block now, or let it run as it is written if it cannot be.

        Args:
            block: The block.
            run: Calls it.
        """
        try:
            with forked_randomness(), unchanged(block), compiling_ahead():
                run()
        except TorchDynamoException as error:
            if block not in self._blocks:
                raise
            block._compiled_call_impl = None
            say(f"{UNCOMPILED}{error}".partition("\n")[0])

    def leave(self) -> None:
        """Let them be as they were, and torch too."""
        remove_split()
        for block in self._blocks:
            block._compiled_call_impl = None  # private: nothing public takes compile() back


def compiled_call(module: nn.Module) -> Any:
    """Return what a module's call is compiled to; None: it is not compiled as a whole."""
    # Private: what module.compile() leaves behind.
    return module if isinstance(module, OptimizedModule) else module._compiled_call_impl


def is_compiled(block: nn.Module) -> bool:
    """Whether a block, or a part of it, is compiled."""
    return any(compiled_call(part) is not None for part in block.modules())


def check_compile(compile: Any) -> None:
    """Check the argument.

    Raises:
        ValueError: Torch would not compile so, or with CUDA graphs.
    """
    if isinstance(compile, bool):
        return
    if not isinstance(compile, Mapping):
        raise ValueError(
            f"compile must be True, False or the arguments of torch.compile, as in "
            f'{{"mode": "max-autotune-no-cudagraphs"}}, not {compile!r}'
        )
    try:
        compiled = torch.compile(nn.Identity(), **compile)
    except Exception as error:
        raise ValueError(
            f"compile={dict(compile)!r} is refused by torch.compile: {error}"
        ) from error
    if compile.get("backend") == "cudagraphs" or _has_cuda_graphs(compiled):
        raise ValueError(f"compile={dict(compile)!r}: a block {CUDA_GRAPHS}")


def check_compiled_parts(module: nn.Module) -> None:
    """Refuse parts that their owner has compiled as a pipeline cannot run them.

    Raises:
        ValueError: There is such a part.
    """
    for path, part in module.named_modules():
        compiled = compiled_call(part)
        if compiled is not None and _has_cuda_graphs(compiled):
            raise ValueError(f"{path} {CUDA_GRAPHS}")


def _has_cuda_graphs(compiled: Any) -> bool:
    # Torch makes it for what it compiles, but not for copies of a compiled module.
    config: dict[str, Any] = getattr(compiled, "get_compiler_config", dict)() or {}
    return bool(config.get("triton.cudagraphs"))


def uncompiled() -> AbstractContextManager[Any]:
    """Run compiled modules as they are written: a compiler would follow each of our operations."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
