"""The chain of blocks that is cut into stages, and the interception of their calls.

A block keeps its place in the module tree, its name and its parameters: only the class of the
instance is replaced, by a subclass whose ``__call__`` calls the running :class:`StepRun`.
"""

from __future__ import annotations

import copyreg
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_pipeoffload.runtime.compiled import compiled_call
from lightning_pipeoffload.runtime.cut.called_blocks import (
    Containers,
    containers_in,
    count_outside_largest,
    is_ambiguous,
    names_of_parents,
    outermost,
    propose_blocks,
)
from lightning_pipeoffload.runtime.shapes import RULES, StepRules
from lightning_pipeoffload.runtime.users_code import original_class, subclass_like


class StepRun(Protocol):
    """One run of the user's step; defines the effect of a call of a block."""

    def call_block(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return block ``index``'s output; :attr:`BlockChain.plain_calls` compute it."""


class StageExit(BaseException):
    """Raised in a call of a block to leave the user's step there."""

    def __init__(self, to_send: list[Tensor], output: Any = None) -> None:
        self.to_send = to_send  # outputs of blocks, and carried values
        self.output = output  # of the block at which the step ends


class BlockChain:
    """Blocks in the order of their positions (:mod:`.call_order`): mostly that of their calls.

    Attributes:
        propose_blocks: Returns a ``blocks=...`` argument with at least the given number of blocks,
            or "".
        plain_calls: Functions that run the blocks without interception, while calls are
            intercepted.
    """

    def __init__(self, name: str, blocks: Mapping[str, nn.Module]) -> None:
        self.name = name
        self.blocks = list(blocks.values())
        self.propose_blocks: Callable[[int], str] = lambda num_stages: ""
        self._names = list(blocks)
        self._origins = [frozenset((f"the output of {block}",)) for block in blocks]
        self._index = {block: index for index, block in enumerate(blocks)}
        self._place = {id(block): index for index, block in enumerate(self.blocks)}
        self._pass: StepRun | None = None
        self.plain_calls: list[Callable[..., Any]] = []
        self._intercepting = False

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def names(self) -> list[str]:
        """The names of the blocks in the user's module."""
        return [*self._names]

    def block_name(self, index: int) -> str:
        """Return the name of a block in the user's module."""
        return self._names[index]

    def describe_point(self, segment: int, is_in_block: bool) -> str:
        """Describe a point of the step for error messages, such as "before layers.1"."""
        if segment == len(self):
            return "after the blocks"
        return f"{'in' if is_in_block else 'before'} {self._names[segment]}"

    def output_origins(self, index: int) -> frozenset[str]:
        """Return the ``origins`` of a block's output where that is shape-only."""
        return self._origins[index]

    def enclosing_block(self, name: str) -> int | None:
        """Return the block that holds a parameter or buffer of this name; None: none does."""
        parts = name.split(".")
        prefixes = (".".join(parts[:length]) for length in range(1, len(parts)))
        return next((self._index[path] for path in prefixes if path in self._index), None)

    @property
    def is_running(self) -> bool:
        """Whether the user's step is running."""
        return self._pass is not None

    def intercept(self) -> None:
        """Route the blocks' calls to the running :class:`StepRun` from now on; idempotent.

        A call while no pass is running runs the block itself.
        """
        if not self._intercepting:
            # One for each class: a compiler starts anew for each type that it meets.
            classes = {plain: _intercepting(plain, self) for plain in set(map(type, self.blocks))}
            self.plain_calls = [MethodType(type(b).__call__, b) for b in self.blocks]
            for block in self.blocks:
                block.__class__ = classes[type(block)]
        self._intercepting = True

    def release(self) -> None:
        """Stop intercepting; idempotent. The blocks get their own classes back."""
        if self._intercepting:
            for block in self.blocks:
                block.__class__ = original_class(block)
        self._intercepting = False


_RULES = StepRules()  # unless the pass has others


class ActiveStepRun:
    """Calls ``step_pass.call_block`` in place of each block called within the context."""

    def __init__(self, chain: BlockChain, step_pass: StepRun) -> None:
        self._chain = chain
        self._step_pass = step_pass

    def __enter__(self) -> None:
        self._chain._pass = self._step_pass
        RULES.append(_RULES)

    def __exit__(self, *error: object) -> None:
        self._chain._pass = None
        RULES.pop()


def find_chain(module: nn.Module, name: str | Sequence[str] | None = None) -> BlockChain:
    """Find the ModuleList or Sequential to cut.

    Without a name this is the container with the most parameters outside of its largest entry.

    Args:
        module: The user's module.
        name: The name of the container that the user gives; or patterns of the blocks' names in the
            order of their calls, in which ``*`` stands for any text between two dots.

    Raises:
        ValueError: No such container or block, several containers that are equally good, or one
            inside of a compiled module.
    """
    _refuse_torchscript_and_lazy(module)
    chain = _find_chain(module, name)
    chain.propose_blocks = partial(propose_blocks, module)
    _check_uncompiled(module, chain)
    return chain


def chain_from_names(module: nn.Module, names: Sequence[str]) -> BlockChain:
    """Return the chain of the blocks with these names, in this order."""
    chain = _chain_of(module, ", ".join(names_of_parents(names)), names)
    chain.propose_blocks = partial(propose_blocks, module)
    _check_uncompiled(module, chain)
    return chain


def default_chain(module: nn.Module) -> BlockChain:
    """Return the chain if the user names none; an empty one if a traced step has to decide."""
    _refuse_torchscript_and_lazy(module)
    names = [path for path, _ in _best_containers(module)]
    if is_ambiguous(module, names[0] if len(names) == 1 else ""):
        return BlockChain("", {})
    return find_chain(module)


def _refuse_torchscript_and_lazy(module: nn.Module) -> None:
    for path, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule) and any(True for _ in child.parameters()):
            raise ValueError(
                f"{path or 'the module'} is TorchScript ({child.original_name}), which keeps its "
                f"weights for itself, so another stage cannot do without them; leave out "
                f"torch.jit.script or torch.jit.trace, and compile blocks with compile=True instead"
            )
    for path, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"{path} is a lazy layer's parameter without a shape yet; give the layer its sizes "
                f"(Linear for LazyLinear), or call the model on a batch in __init__"
            )


def _check_uncompiled(module: nn.Module, chain: BlockChain) -> None:
    for path, child in module.named_modules():
        if compiled_call(child) is None:
            continue
        if any(name.startswith(f"{path}.") for name in chain.names):
            raise ValueError(
                f"{path} is compiled as a whole and contains the blocks {chain.name}; a stage runs "
                f"only its own blocks, so compile the blocks instead, block.compile() for each"
            )


def _find_chain(module: nn.Module, name: str | Sequence[str] | None) -> BlockChain:
    if name is not None and not isinstance(name, str):
        return _chain_of_patterns(module, name)
    if name is not None:
        return _named_chain(module, _lists_in(module), name)
    # The entries of a dict may be called in another order, which the first step refuses then.
    best = _best_containers(module) or _best_of(module, containers_in(module))
    if not best:
        other = propose_blocks(module)
        raise ValueError(
            f"found no ModuleList or Sequential of blocks with parameters in "
            f"{type(module).__name__}; a pipeline is cut between its entries, so keep the model's "
            f"layers in one and call them once each and in order"
            f"{f', or name the blocks in the order of their calls: {other}' if other else ''}"
        )
    if len(best) > 1:
        raise ValueError(
            f"{', '.join(path for path, _ in best)} could each be the chain of blocks; name the "
            f"blocks that the step calls, in the order of their calls: "
            f"{propose_blocks(module, 1)}"
        )
    return _chain_of(module, *best[0])


def _lists_in(module: nn.Module) -> Containers:
    return {
        path: names
        for path, names in containers_in(module).items()
        if not isinstance(module.get_submodule(path), nn.ModuleDict)
    }


def _best_containers(module: nn.Module) -> list[tuple[str, Sequence[str]]]:
    """Return the lists with the most parameters outside of their largest entry."""
    return _best_of(module, _lists_in(module))


def _best_of(module: nn.Module, containers: Containers) -> list[tuple[str, Sequence[str]]]:
    sizes = {path: count_outside_largest(module, names) for path, names in containers.items()}
    best = max(sizes.values(), default=(0, 0))
    paths = [path for path, each in sizes.items() if each == best > (0, 0)]
    return [(path, containers[path]) for path in outermost(paths)]


def _chain_of(module: nn.Module, name: str, blocks: Iterable[str]) -> BlockChain:
    return BlockChain(name, {block: module.get_submodule(block) for block in blocks})


def _chain_of_patterns(module: nn.Module, patterns: Sequence[str]) -> BlockChain:
    modules = dict(module.named_modules())
    blocks: dict[str, nn.Module] = {}
    for pattern in patterns:
        expression = re.escape(pattern).replace(r"\*", "[^.]*")
        matching = {
            path: child for path, child in modules.items() if re.fullmatch(expression, path)
        }
        if not matching:
            parents = [
                path for path, child in modules.items() if path and len(list(child.children()))
            ]
            raise ValueError(
                f"blocks={list(patterns)!r}: no module is called {pattern!r}; with others inside "
                f"there are {', '.join(parents[:20]) or 'none'}"
            )
        blocks.update(matching)
    _check_apart(list(blocks), patterns)
    return BlockChain(", ".join(patterns), blocks)


def _check_apart(names: Sequence[str], patterns: Sequence[str]) -> None:
    for outer in names:
        for inner in names:
            if inner.startswith(f"{outer}."):
                raise ValueError(
                    f"blocks={list(patterns)!r} finds {inner} inside of {outer}; each has to be a "
                    f"block of its own"
                )


def _named_chain(module: nn.Module, containers: Containers, name: str) -> BlockChain:
    if name not in containers:
        similar = get_close_matches(name, containers, n=1)
        hint = f"; did you mean {similar[0]!r}?" if similar else ""
        raise ValueError(
            f"blocks={name!r} is not a ModuleList or Sequential of the module; it has "
            f"{', '.join(containers) or 'none'}{hint}"
        )
    return _chain_of(module, name, containers[name])


def _intercepting(plain: type[nn.Module], chain: BlockChain) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if chain._pass is None:
            return plain.__call__(self, *args, **kwargs)
        return chain._pass.call_block(chain._place[id(self)], args, kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        # Not copyreg.__newobj__, with which pickle insists on the object's own class.
        state = object.__reduce_ex__(self, 2)[2]
        return copyreg._reconstructor, (plain, object, None), state  # type: ignore[attr-defined]

    return subclass_like(plain, {"__call__": call, "__reduce_ex__": reduce})
