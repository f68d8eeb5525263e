"""The chain of blocks that is cut into stages, the hook that sees each call, and how a step calls.

A block keeps its place, its name and its parameters: the one instance is given a subclass whose
``__call__`` asks the pass under way what to do. A way to call that a stage could not follow, or not
alike in B, is refused.
"""

from __future__ import annotations

import copyreg
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map  # private: see runtime/leaves

from lightning_pipeoffload.runtime.compiled.block_compiler import is_compiled
from lightning_pipeoffload.runtime.in_force import IN_FORCE
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.shapes.step_rules import StepRules
from lightning_pipeoffload.runtime.users_code.instance_class import own_class, subclass_like
from lightning_pipeoffload.runtime.users_code.users_lines import calling_line, in_brackets


class Pass(Protocol):
    """One run of the user's step: decides what a call of a block does."""

    def call_block(self, index: int, call: Callable[[], Any], arguments: Any) -> Any:
        """Return block ``index``'s output; ``call()`` computes it, ``arguments`` is a pytree."""


class StageExit(BaseException):
    """Leaves the user's step at a block.

    Attributes:
        payload: The tensors of that block's output, and what goes to the next stage beside it.
    """

    def __init__(self, payload: list[Tensor]) -> None:
        self.payload = payload


class BlockChain:
    """Blocks in the order of their calls."""

    def __init__(self, name: str, blocks: Mapping[str, nn.Module]) -> None:
        self.name = name
        self.blocks = list(blocks.values())
        self._names = list(blocks)
        self._origins = [frozenset((f"the output of {block}",)) for block in blocks]
        self._index = {block: index for index, block in enumerate(blocks)}
        self._place = {id(block): index for index, block in enumerate(self.blocks)}
        self._pass: Pass | None = None
        self._intercepting = False

    def __len__(self) -> int:
        return len(self.blocks)

    def block_name(self, index: int) -> str:
        """Return the name of a block in the user's module."""
        return self._names[index]

    def output_origins(self, index: int) -> frozenset[str]:
        """Return what the output of a block comes from, for where it is not."""
        return self._origins[index]

    def index_of(self, name: str) -> int | None:
        """Return the block that holds a parameter or buffer of this name; None: no block does."""
        parts = name.split(".")
        prefixes = (".".join(parts[:length]) for length in range(1, len(parts)))
        return next((self._index[path] for path in prefixes if path in self._index), None)

    def plain_call(self, index: int) -> Callable[..., Any]:
        """Return what calls a block as its own class does."""
        block = self.blocks[index]
        return MethodType(own_class(block).__call__, block)

    @property
    def is_running(self) -> bool:
        """Whether a run of the user's step is under way."""
        return self._pass is not None

    def running(self, step_pass: Pass) -> AbstractContextManager[None]:
        """Let ``step_pass`` decide about the blocks' calls."""
        return _Running(self, step_pass)

    def intercept(self) -> None:
        """See the blocks' calls from now on; again is harmless."""
        if not self._intercepting:
            # One for each class: a compiler starts anew for each type that it meets.
            classes = {plain: _intercepting(plain, self) for plain in set(map(type, self.blocks))}
            for block in self.blocks:
                block.__class__ = classes[type(block)]
        self._intercepting = True

    def release(self) -> None:
        """Give the blocks their own classes back."""
        if self._intercepting:
            for block in self.blocks:
                block.__class__ = own_class(block)
        self._intercepting = False


_RULES = StepRules()  # of who says no others


class _Running:
    def __init__(self, chain: BlockChain, step_pass: Pass) -> None:
        self._chain = chain
        self._step_pass = step_pass

    def __enter__(self) -> None:
        self._chain._pass = self._step_pass
        IN_FORCE.begin(_RULES)

    def __exit__(self, *error: object) -> None:
        self._chain._pass = None
        IN_FORCE.end(_RULES)


def find_chain(module: nn.Module, name: str | Sequence[str] | None = None) -> BlockChain:
    """Find the ModuleList or Sequential to cut.

    The one that leaves the most parameters outside of its largest entry, that is, the one whose
    cutting can spread the most; an outer container that holds the chain as one entry loses to it.

    Args:
        module: The user's module.
        name: The name of the container, where the user says it; or patterns of the blocks' names in
            the order of their calls, in which ``*`` stands for any part of a name between two dots.

    Raises:
        ValueError: No such container or block, several containers that are equally good, or one
            inside of a compiled module.
    """
    chain = _find_chain(module, name)
    _check_uncompiled(module, chain)
    return chain


def _check_uncompiled(module: nn.Module, chain: BlockChain) -> None:
    for path, child in module.named_modules():
        around = any(chain.block_name(i).startswith(f"{path}.") for i in range(len(chain)))
        # Private, both: what torch.compile(module) and module.compile() leave behind.
        if around and (hasattr(child, "_orig_mod") or child._compiled_call_impl is not None):
            raise ValueError(
                f"{path} is compiled as a whole, its blocks {chain.name} inside of it, of which "
                f"each stage runs its own only; compile the blocks instead, block.compile() for "
                f"each"
            )


def _find_chain(module: nn.Module, name: str | Sequence[str] | None) -> BlockChain:
    if name is not None and not isinstance(name, str):
        return _chain_of_patterns(module, name)
    containers = {
        path: child
        for path, child in module.named_modules()
        if path and isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child)
    }
    if name is not None:
        return _named_chain(containers, name)
    spread = {path: _spread(child) for path, child in containers.items()}
    best = max(spread.values(), default=(0, 0))
    names = [path for path, value in spread.items() if value == best]
    if best == (0, 0):
        raise ValueError(
            f"found no ModuleList or Sequential of blocks with parameters in "
            f"{type(module).__name__}; a pipeline is cut between its entries, so keep the model's "
            f"layers in one and call them once each and in order"
        )
    if len(names) > 1:
        raise ValueError(
            f"{' and '.join(names)} could both be the chain of blocks; say which with "
            f'blocks="{names[0]}"'
        )
    return _chain_of(names[0], containers[names[0]])


def _chain_of(name: str, container: nn.Module) -> BlockChain:
    return BlockChain(name, {f"{name}.{key}": block for key, block in container.named_children()})


def _chain_of_patterns(module: nn.Module, patterns: Sequence[str]) -> BlockChain:
    modules = dict(module.named_modules())
    blocks: dict[str, nn.Module] = {}
    for pattern in patterns:
        expression = re.escape(pattern).replace(r"\*", "[^.]*")
        found = {path: child for path, child in modules.items() if re.fullmatch(expression, path)}
        if not found:
            known = [
                path for path, child in modules.items() if path and len(list(child.children()))
            ]
            raise ValueError(
                f"blocks={list(patterns)!r}: no module is called {pattern!r}; with others inside "
                f"there are {', '.join(known[:20]) or 'none'}"
            )
        blocks.update(found)
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


def _named_chain(containers: Mapping[str, nn.Module], name: str) -> BlockChain:
    if name not in containers:
        similar = get_close_matches(name, containers, n=1)
        hint = f"; did you mean {similar[0]!r}?" if similar else ""
        raise ValueError(
            f"blocks={name!r} is not a ModuleList or Sequential of the module; it has "
            f"{', '.join(containers) or 'none'}{hint}"
        )
    return _chain_of(name, containers[name])


def _spread(container: nn.Module) -> tuple[int, int]:
    sizes = [sum(p.numel() for p in block.parameters()) for block in container.children()]
    return sum(sizes) - max(sizes), sum(sizes)


def _intercepting(plain: type[nn.Module], chain: BlockChain) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if chain._pass is None:
            return plain.__call__(self, *args, **kwargs)
        run = partial(plain.__call__, self, *args, **kwargs)
        return chain._pass.call_block(chain._place[id(self)], run, (args, kwargs))

    def reduce(self: nn.Module, protocol: Any) -> Any:
        # Not copyreg.__newobj__, with which pickle insists on the object's own class.
        state = object.__reduce_ex__(self, 2)[2]
        return copyreg._reconstructor, (plain, object, None), state  # type: ignore[attr-defined]

    return subclass_like(plain, {"__call__": call, "__reduce_ex__": reduce})


@dataclass(frozen=True)
class BlockCall:
    """One call of a block as training makes it, but for the values.

    Attributes:
        arguments: Its arguments, those without values described.
        autocast: The dtype that autocast computes in; None: it is off.
        device_type: The type of device that autocast is for.
    """

    arguments: Any
    autocast: torch.dtype | None
    device_type: str

    @classmethod
    def of(cls, arguments: Any, device_type: str) -> BlockCall:
        """Describe the call that is being made."""
        is_on = torch.is_autocast_enabled(device_type)
        autocast = torch.get_autocast_dtype(device_type) if is_on else None
        return cls(tree_map(_describe, arguments), autocast, device_type)

    @contextmanager
    def with_zeros(self) -> Iterator[Any]:
        """Return the arguments with zeros for values; inside, autocast is as it was."""
        with torch.autocast(self.device_type, self.autocast, enabled=self.autocast is not None):
            yield tree_map(_make_zeros, self.arguments)


@dataclass(frozen=True)
class _Argument:
    meta: Tensor
    device: torch.device
    requires_grad: bool


def _describe(leaf: Any) -> Any:
    if not isinstance(leaf, ShapeOnly):
        return leaf
    return _Argument(leaf.meta.detach(), leaf.device, leaf.requires_grad)


def _make_zeros(leaf: Any) -> Any:
    if not isinstance(leaf, _Argument):
        return leaf
    zeros = torch.zeros_like(leaf.meta, device=leaf.device)
    return zeros.requires_grad_(leaf.requires_grad)


class BlockCalls:
    """The calls of a chain's blocks in one run of a step, of which the compiled ones are kept."""

    def __init__(self, chain: BlockChain, device: torch.device, found: list[BlockCall]) -> None:
        self._device_type = device.type
        self._keeps = any(is_compiled(block) for block in chain.blocks)
        self._found = found
        self._chain = chain
        self._training = torch.is_grad_enabled()
        self._checkpoint: Any = None
        self._num_hooks: list[int] = []

    def see(self, index: int, expected: int, arguments: Any) -> None:
        """Look at a call before it is made.

        Raises:
            ValueError: A stage could not make it; says why and where.
        """
        self._check_order(index, expected)
        self._check_gradients(index)
        self._check_checkpoint(index)
        if self._keeps:
            self._found.append(BlockCall.of(arguments, self._device_type))
        self._num_hooks.append(_count_hooks(self._chain.blocks[index]))

    def _check_order(self, index: int, expected: int) -> None:
        if index == expected:
            return
        what = f"before {self._chain.block_name(expected)}" if index > expected else "again"
        raise ValueError(
            f"the step calls {self._chain.block_name(index)} {what}"
            f"{in_brackets(calling_line())}; a pipeline needs each entry of {self._chain.name} "
            f"called once and in order"
        )

    def _check_gradients(self, index: int) -> None:
        if self._training and not torch.is_grad_enabled():
            raise ValueError(
                f"the step calls {self._chain.block_name(index)} without gradients"
                f"{in_brackets(calling_line())}: leave out torch.no_grad(), and write "
                f"checkpoint(..., use_reentrant=False)"
            )

    def _check_checkpoint(self, index: int) -> None:
        outer, self._checkpoint = self._checkpoint, _checkpoint_around()
        if outer is not None and outer is self._checkpoint:
            raise ValueError(
                f"the step checkpoints {self._chain.block_name(index - 1)} and "
                f"{self._chain.block_name(index)} together"
                f"{in_brackets(calling_line())}; a stage can only compute its own blocks again, so "
                f"checkpoint each by itself, or leave it to "
                f'recompute="full"'
            )

    def check_complete(self, expected: int) -> None:
        """Check that no block is left when the step is over.

        Args:
            expected: Index of the block that comes next; their number: none does.

        Raises:
            ValueError: A block is not called.
        """
        if expected < len(self._chain):
            raise ValueError(
                f"the step does not call {self._chain.block_name(expected)}; a pipeline needs "
                f"each entry of {self._chain.name} called once and in order"
            )

    def find_briefly_hooked(self) -> Iterator[int]:
        """Yield the blocks that had more hooks when they were called than they have now."""
        for index, (block, before) in enumerate(
            zip(self._chain.blocks, self._num_hooks, strict=False)
        ):
            if _count_hooks(block) < before:
                yield index


def _count_hooks(block: nn.Module) -> int:
    # Private: which hooks a module has can be seen nowhere else.
    return len(block._forward_hooks) + len(block._forward_pre_hooks)


def _checkpoint_around() -> Any:
    """Return what is the same while one checkpoint's function runs; None outside of any."""
    # Private: nothing public tells of a checkpoint, in which blocks are called again in B.
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or not hooks[0].__qualname__.startswith("_checkpoint_hook."):
        return None
    return hooks[0]
