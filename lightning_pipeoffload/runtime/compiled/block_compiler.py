"""Compilation of blocks, and a hook between torch.compile and its backend that splits regions.

The hook gets the graph of every region, whether it is compiled by ``block.compile()``,
``torch.compile(block)`` or a decorator on a function, by the user or by this package.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import trace_rules  # private: the code that is not compiled
from torch._dynamo.eval_frame import OptimizedModule  # private: the type of torch.compile(module)

# Private: the first two restart the compiler or skip a frame; only the last is a failure.
from torch._dynamo.exc import RestartAnalysis, SkipFrame, TorchDynamoException

from lightning_pipeoffload.runtime import replaced
from lightning_pipeoffload.runtime.compiled.split_graph import split_graph
from lightning_pipeoffload.runtime.compiled.split_region import (
    Region,
    SplitRegion,
    compiling_ahead,
    wrap_compiled_ahead,
)
from lightning_pipeoffload.runtime.users_code import restoring_attributes
from lightning_pipeoffload.runtime.weight_grad import active_queue

log = logging.getLogger(__name__)

Backend = Callable[..., Region]
_FUSED = "a compiled block gets its weight gradients in B, for it does not compile without: "
_CHECKPOINTED = (
    "what a compiled block checkpoints by itself gets its weight gradients in B; leave its own "
    'checkpointing off, and let recompute="full" do it'
)
UNCOMPILED = "a block runs as it is written, for it does not compile: "
# Private, both: torch.compile's wrappers of a backend.
_KINDS: tuple[type[Any], ...] = (torch._TorchCompileWrapper, torch._TorchCompileInductorWrapper)


@contextmanager
def splitting_regions() -> Iterator[None]:
    """Split compiled regions of steps within the context."""
    _skip_package_code()
    with ExitStack() as stack:
        for kind in _KINDS:
            stack.enter_context(replaced(kind, "__call__", _wrap_backend(kind.__call__)))
        yield


@cache
def _skip_package_code() -> None:
    """Have no code of this package compiled but that of layers which tensor ranks share."""
    runtime = __name__.rpartition(".compiled.")[0]
    for part in iter_modules([str(Path(__file__).parents[1])], f"{runtime}."):
        if part.name != f"{runtime}.tensor_parallel":
            trace_rules.add(part.name)


def _wrap_backend(call: Backend) -> Backend:
    def compile_graph(self: Any, module: fx.GraphModule, inputs: Any, **options: Any) -> Region:
        def compile_plainly(module: fx.GraphModule, inputs: Any) -> Region:
            return call(self, module, inputs, **options)

        if active_queue() is None or not torch.is_grad_enabled():
            return compile_plainly(module, inputs)
        return _compile_split_region(compile_plainly, module, inputs)

    return compile_graph


def _compile_split_region(compile_plainly: Backend, module: fx.GraphModule, inputs: Any) -> Region:
    if _has_checkpoint(module):
        warn_once(_CHECKPOINTED)
    graph, error = _try(split_graph, module, inputs)
    if graph is not None:
        compiled, error = _try(compile_plainly, graph.module, graph.examples)
        if compiled is not None:
            return SplitRegion(graph, compiled, torch.compile(module, backend=compile_plainly))
    whole, second = _try(compile_plainly, module, inputs)
    if second is not None:
        warn_once(UNCOMPILED + _first_line(second))
        return wrap_compiled_ahead(_eager_region(module))
    if error is not None:
        warn_once(_FUSED + _first_line(error))
    assert whole is not None
    return wrap_compiled_ahead(whole)


def _has_checkpoint(module: fx.GraphModule) -> bool:
    names = (getattr(node.target, "__name__", "") for node in module.graph.nodes)
    return "tag_activation_checkpoint" in names  # private: torch's name of a compiled checkpoint


def _eager_region(module: fx.GraphModule) -> Region:
    if any(node.op == "get_attr" for node in module.graph.nodes):
        raise SkipFrame("subgraphs, of activation checkpoints say, cannot run without a compiler")
    return module.forward


@cache
def warn_once(line: str) -> None:
    log.warning(line)


def _try(function: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
    try:
        return function(*args), None
    except (RestartAnalysis, SkipFrame):
        raise
    except Exception as error:
        return None, error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


Compile = bool | Mapping[str, Any]
CUDA_GRAPHS = (
    "is compiled with CUDA graphs, which own their outputs, while a pipeline has several "
    'microbatches in flight; use mode="max-autotune-no-cudagraphs", or none'
)


class BlockCompiler:
    """Compiles the blocks that the user has not compiled; splits every compiled backward into B, W.

    Raises:
        ValueError: The user has compiled a submodule with CUDA graphs.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module], compile: Compile) -> None:
        refuse_cuda_graphs(module)
        self._all = blocks
        self._arguments = compile if isinstance(compile, Mapping) else {}
        self._blocks = [] if compile is False else [b for b in blocks if compiled_call(b) is None]

    def enable_compilation(self) -> None:
        """Compile the blocks at their first calls."""
        for block in self._blocks:
            if compiled_call(block) is None:
                block.compile(**self._arguments)

    @property
    def has_compiled_blocks(self) -> bool:
        """Whether any block is compiled, by the user or here."""
        return any(map(is_compiled, self._all))

    def compile_ahead(self, block: nn.Module, run: Callable[[], Any]) -> None:
        """Compile a block now; if that fails, the block runs uncompiled."""
        try:
            with restoring_attributes(block), compiling_ahead():
                run()
        except TorchDynamoException as error:
            if block not in self._blocks:
                raise
            block._compiled_call_impl = None
            warn_once(f"{UNCOMPILED}{error}".partition("\n")[0])

    def undo_compilation(self) -> None:
        """Undo the compilation."""
        for block in self._blocks:
            block._compiled_call_impl = None  # private: nothing public takes compile() back


def compiled_call(module: nn.Module) -> Any:
    """Return the compiled call of a module; None if it is not compiled as a whole."""
    # Private: set by module.compile().
    return module if isinstance(module, OptimizedModule) else module._compiled_call_impl


def is_compiled(block: nn.Module) -> bool:
    """Return whether a block or one of its submodules is compiled."""
    return any(compiled_call(part) is not None for part in block.modules())


def check_compile(compile: Any) -> None:
    """Refuse invalid arguments of ``torch.compile``, and those that enable CUDA graphs."""
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


def refuse_cuda_graphs(module: nn.Module) -> None:
    """Refuse modules that the user has compiled with CUDA graphs."""
    for path, part in module.named_modules():
        compiled = compiled_call(part)
        if compiled is not None and _has_cuda_graphs(compiled):
            raise ValueError(f"{path} {CUDA_GRAPHS}")


def _has_cuda_graphs(compiled: Any) -> bool:
    # Torch sets it where it compiles, but not on copies of a compiled module.
    config: dict[str, Any] = getattr(compiled, "get_compiler_config", dict)() or {}
    return bool(config.get("triton.cudagraphs"))


def force_eager() -> AbstractContextManager[Any]:
    """Run compiled modules eagerly: a compiler would trace this package's operations too."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
