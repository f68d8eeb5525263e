"""Output shapes of custom kernels that take tensor addresses, found by running them on zeros.

A Triton kernel, or one of a C++ extension, gets the addresses of tensors, which a tensor without a
value does not have. So the innermost autograd Function or module that calls such a kernel is run on
zeros on the device, once for each class and input shape; its parameters are zeros too. A call with
shape-only tensors then returns shape-only results of the same shapes, and saves shape-only tensors
for its backward like those that the run on zeros saved::

    traced step      Silu.apply(shapes)  ->  a kernel asks for an address: Silu is registered
    traced again     Silu.apply(shapes)  ->  Silu.apply(zeros), once; shapes like its results

For the numbering of carried values, such a call counts as one torch function on every stage.
"""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, Function
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import (  # private: whether there is one that counts calls
    _get_current_function_mode,
    handle_torch_function,
)
from torch.utils._python_dispatch import (  # private: its documented home
    TorchDispatchMode,
    _disable_current_modes,
)
from torch.utils._pytree import tree_map  # private: see runtime/leaves
from torch.utils.flop_counter import flop_registry

from lightning_pipeoffload.runtime import (
    forked_randomness,
    leaves_of,
    map_operands,
    map_output,
    output_leaves,
    output_tensors,
    replaced,
    tensors_in,
)
from lightning_pipeoffload.runtime.shapes.shape_only import (
    ShapeOnly,
    has_shape_only,
    origins_of,
    shape_only_leaves,
    storage_key,
    substitute_values,
)
from lightning_pipeoffload.runtime.shapes.step_rules import AddressNeededError, notify_observer
from lightning_pipeoffload.runtime.users_code import (
    REGISTRIES,
    Slot,
    find_slots,
    restoring_attributes,
    swapped,
)

log = logging.getLogger(__name__)

_FOUND = (
    "%s calls a kernel with the addresses of tensors, which tensors without values do not have; it "
    "is run on zeros on %s, once for each shape, and the shapes of its results are used (an "
    "operator of torch.library with a function of shapes needs no such run)"
)
_HELD = "{0} is called by a reference to its apply that was taken before; call {0}.apply itself"
_SOME = frozenset({"a weight or the output of a block"})
_CALL = nn.Module._call_impl.__code__
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


_Observe = Callable[[str, Any], None]


def _do_nothing(name: str, arguments: Any) -> None:
    pass


class KernelFoundError(Exception):
    """A traced step called an address-taking kernel, now registered: trace the step again."""


class KernelsOnZeros:
    """The autograd Functions and modules of one model that are run on zeros."""

    def __init__(self) -> None:
        self._functions: set[Any] = set()
        self._modules: dict[Any, Callable[..., Any]] = {}  # owners of a forward, and the forward
        self._results: dict[Hashable, tuple[_Result, Any]] = {}
        self._reported: set[Any] = set()
        self._observe: _Observe = _do_nothing
        self._reason = ""

    def copy(self) -> KernelsOnZeros:
        """Return a copy that starts with the same Functions and modules."""
        copied = KernelsOnZeros()
        copied._functions, copied._modules = {*self._functions}, {**self._modules}
        copied._reported = self._reported
        return copied

    def register_from_error(self, error: BaseException, blocks: Iterable[nn.Module]) -> bool:
        """Add the innermost Function or module in which an error has asked for an address.

        Returns:
            Whether one was added. A module that contains any of ``blocks`` is never added. If the
            Function was added before, its plain ``apply`` was called; its module is added
            instead.
        """
        self._reason = ""
        if not _asks_for_address(error):
            return False
        for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
            function = _function_of(frame)
            if function is not None and function not in self._functions:
                self._functions.add(function)
                return True
            if function is not None:
                self._reason = _HELD.format(function.__qualname__)
            if frame.f_code is _CALL:
                return self._add_module(frame.f_locals["self"], blocks)
        return False

    def explain_why_not_registered(self, error: BaseException) -> BaseException:
        """Return ``error`` with the reason why :meth:`register_from_error` registered nothing."""
        if not _asks_for_address(error):
            return error
        origins = error.origins if isinstance(error, AddressNeededError) else _SOME
        explained = AddressNeededError(origins, self._reason)
        return explained.with_traceback(error.__traceback__)

    def _add_module(self, module: nn.Module, blocks: Iterable[nn.Module]) -> bool:
        inside = {*module.modules()} - {module}
        owner: Any = module
        if "forward" not in vars(module):
            owner = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
        if owner in self._modules or not inside.isdisjoint(blocks):
            return False
        self._modules[owner] = vars(owner)["forward"]
        return True

    @contextmanager
    def running_on_zeros(self, observe: _Observe = _do_nothing) -> Iterator[None]:
        """Within the context, run registered Functions and modules on zeros if values are missing.

        Args:
            observe: Called with a name and the arguments at each of their calls, real ones too.
        """
        if not self._functions and not self._modules:
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(replaced(self, "_observe", observe))
            for function in self._functions:
                apply = classmethod(self._make_apply_wrapper(function))
                stack.enter_context(replaced(function, "apply", apply))
            for owner, plain in self._modules.items():
                forward = self._make_forward_wrapper(owner, plain)
                stack.enter_context(replaced(owner, "forward", forward))
            yield

    def _make_apply_wrapper(self, function: Any) -> Callable[..., Any]:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return self._call(_KernelCall(cls, super(function, cls).apply), args, kwargs)  # type: ignore[misc]

        return apply

    def _make_forward_wrapper(self, owner: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            run = plain if owner is module else partial(plain, module)
            return self._call(_KernelCall(type(module), run, module), args, kwargs)

        return partial(forward, owner) if isinstance(owner, nn.Module) else forward

    def _call(self, kernel: _KernelCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._observe(kernel.name, (args, kwargs, kernel.tensors))
        operands = substitute_values((args, kwargs)), kernel.tensors
        run = partial(self._run, kernel)
        if _get_current_function_mode() is None:
            return run(*operands)
        return handle_torch_function(run, (), *operands)

    def _run(self, kernel: _KernelCall, arguments: Any, weights: list[Tensor]) -> Any:
        args, kwargs = arguments
        if not has_shape_only((arguments, weights)):
            return kernel.run(*args, **kwargs)
        inputs = tensors_in((arguments, weights))
        key, kept = _key_of(kernel, arguments, inputs[0].device.type)
        if key not in self._results:
            self._results[key] = _run_on_zeros(kernel, arguments, inputs), kept
            if kernel.kind not in self._reported:
                self._reported.add(kernel.kind)
                log.info(_FOUND, kernel.name, shape_only_leaves(inputs)[0].device)
        return self._results[key][0].like(inputs)


def _function_of(frame: FrameType) -> Any:
    """Return the autograd Function whose forward or backward a frame runs, or a part of it."""
    code, variables = frame.f_code, frame.f_locals
    names = code.co_varnames[: max(code.co_argcount, 1)]  # or that of *args
    first = variables.get(names[0]) if names else None
    if isinstance(first, tuple):
        first = next(iter(first), None)
    if isinstance(first, BackwardCFunction):
        return first._forward_cls  # type: ignore[attr-defined]
    functions = subclasses_of(Function)  # with a setup_context, forward gets no context
    return next((f for f in functions if code_of(f.forward) is code), None)


def subclasses_of(kind: Any) -> Iterator[Any]:
    """Yield all classes that derive from ``kind``."""
    for subclass in kind.__subclasses__():
        yield subclass
        yield from subclasses_of(subclass)


def code_of(function: Any) -> Any:
    """Return the code of a function, also of a decorated one; None if it is not Python's."""
    return getattr(inspect.unwrap(function), "__code__", None)


def _asks_for_address(error: BaseException) -> bool:
    # torch's own errors, where C++ asks for it or Python asks a storage.
    if isinstance(error, AddressNeededError):
        return not error.reason  # else it fails on zeros too
    return isinstance(error, RuntimeError) and "data pointer" in str(error)


class _KernelCall:
    """A call of a Function or of a module's forward."""

    def __init__(self, kind: Any, run: Callable[..., Any], module: nn.Module | None = None) -> None:
        self.kind = kind
        self.run = run
        self.module = module
        self.name = kind.__qualname__
        self.slots: list[Slot] = [] if module is None else find_slots(module)
        self.tensors = [slot.tensor for slot in self.slots]


def _key_of(kernel: _KernelCall, arguments: Any, device: str) -> tuple[Hashable, list[Any]]:
    """Return a key that determines the results' shapes, and what must be kept for ids in it."""
    is_autocast = torch.is_autocast_enabled(device)
    modes = torch.is_grad_enabled(), is_autocast and torch.get_autocast_dtype(device)
    kept: list[Any] = []

    def describe(leaf: Any) -> Hashable:
        if isinstance(leaf, Tensor):
            form = leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad
            return isinstance(leaf, ShapeOnly), *form
        if isinstance(leaf, _PLAIN):
            return type(leaf), leaf
        kept.append(leaf)
        return type(leaf), id(leaf)

    parts = () if kernel.module is None else kernel.module.modules()
    attributes = [
        (name, *map(describe, leaves_of(value)))
        for part in parts
        for name, value in vars(part).items()
        if name not in REGISTRIES or name == "training"
    ]
    leaves = *map(describe, leaves_of(arguments)), *map(describe, kernel.tensors)
    return (kernel.kind, modes, leaves, tuple(attributes)), kept


class _RecordedTensor:  # no dataclass, which would be opened
    """A tensor of a run on zeros.

    Attributes:
        memory: The number of the input with which it shares memory; new memory has the numbers
            after these.
        meta: Its shape, strides and offset, in memory of that size.
        trains: Whether it requires a gradient.
    """

    def __init__(self, memory: int, meta: Tensor, trains: bool) -> None:
        self.memory = memory
        self.meta = meta
        self.trains = trains


@dataclass(frozen=True)
class _Result:
    """The results of a run on zeros.

    Attributes:
        tree: Its return value, with :class:`_RecordedTensor` for tensors.
        saved: The tensors that it saved for its backward.
        products: Its matrix products, with their arguments and results.
    """

    tree: Any
    saved: list[_RecordedTensor]
    products: list[tuple[Any, tuple[Any, ...], Any]]

    @classmethod
    def of(cls, output: Any, inputs: list[Tensor], saved: list[Tensor], products: Any) -> _Result:
        """Describe a run's return value and saved tensors."""
        numbers: dict[int, int] = {}
        for leaf in (*inputs, *saved, *output_tensors(output)):
            numbers.setdefault(storage_key(leaf), len(numbers))

        def describe(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            size = leaf.untyped_storage().nbytes() // leaf.element_size()
            whole = torch.empty(size, dtype=leaf.dtype, device="meta")
            meta = whole.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
            return _RecordedTensor(numbers[storage_key(leaf)], meta, leaf.requires_grad)

        return cls(map_output(describe, output), [*map(describe, saved)], products)

    def like(self, inputs: list[Tensor]) -> Any:
        """Return shape-only results of a call with these inputs."""
        leaves = [leaf for leaf in output_leaves(self.tree) if isinstance(leaf, _RecordedTensor)]
        outputs = iter(_ShapeOnlyFunction.apply(self, leaves, *inputs) if leaves else ())
        return map_output(
            lambda leaf: next(outputs) if type(leaf) is _RecordedTensor else leaf, self.tree
        )


class _ShapeOnlyFunction(Function):
    """Returns the shapes of a result; its backward those of gradients."""

    @staticmethod
    def forward(ctx: Any, result: _Result, leaves: list[_RecordedTensor], *inputs: Tensor) -> Any:
        shapes = [*shape_only_leaves(inputs)]
        make = _Maker(inputs, shapes[0].device, origins_of(shapes))
        outputs = [*map(make, leaves)]
        ctx.save_for_backward(*map(make, result.saved))
        pairs = zip(outputs, leaves, strict=True)
        ctx.mark_non_differentiable(*(output for output, each in pairs if not each.trains))
        needed = zip(inputs, ctx.needs_input_grad[2:], strict=True)
        ctx.inputs = [leaf if is_needed else None for leaf, is_needed in needed]
        notify_observer(torch.ops.aten.cat.default, (shapes,), outputs)
        for operation in result.products:
            notify_observer(*operation)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _ = ctx.saved_tensors  # as its own backward asks for them
        return (
            None,
            None,
            *(None if leaf is None else _placeholder_gradient(leaf) for leaf in ctx.inputs),
        )


def _placeholder_gradient(leaf: Tensor) -> Tensor:
    if not isinstance(leaf, ShapeOnly):
        return torch.zeros_like(leaf)
    return ShapeOnly(torch.empty_like(leaf.meta), leaf.device, leaf.origins)


class _Maker:
    """Makes the tensors of one call; those that shared memory do so again."""

    def __init__(
        self, inputs: Sequence[Tensor], device: torch.device, origins: frozenset[str]
    ) -> None:
        self._bases = dict(enumerate(inputs))
        self._form = device, origins

    def __call__(self, leaf: _RecordedTensor) -> Tensor:
        meta = leaf.meta
        base = self._bases.get(leaf.memory)
        if base is None:
            size = meta.untyped_storage().nbytes() // meta.element_size()
            base = ShapeOnly(torch.empty(size, dtype=meta.dtype, device="meta"), *self._form)
            self._bases[leaf.memory] = base
        view = meta.shape, meta.stride(), meta.storage_offset()
        if not isinstance(base, ShapeOnly):
            return base.detach().as_strided(*view)
        return ShapeOnly(base.meta.detach().as_strided(*view), *self._form)


def _run_on_zeros(kernel: _KernelCall, arguments: Any, inputs: list[Tensor]) -> _Result:
    origins = origins_of(shape_only_leaves(inputs))
    saved: list[Tensor] = []
    products = _FlopRecorder(origins)

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor.detach()

    with ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(_disable_current_modes())
        zeros = {id(leaf): _zeros_like(leaf) for leaf in inputs}
        stack.enter_context(saved_tensors_hooks(save, lambda tensor: tensor))
        if kernel.module is None:
            stack.enter_context(forked_randomness())
        else:
            stack.enter_context(restoring_attributes(kernel.module))
        in_slots = ((slot, zeros[id(slot.tensor)]) for slot in kernel.slots)
        stack.enter_context(swapped(in_slots))
        args, kwargs = tree_map(lambda leaf: zeros.get(id(leaf), leaf), arguments)
        try:
            with products:
                output = kernel.run(*args, **kwargs)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            reason = f"{kernel.name} calls it, and fails on zeros too ({failure})"
            raise AddressNeededError(origins, reason) from error
        return _Result.of(output, [*zeros.values()], saved, products.operations)


def _zeros_like(leaf: Tensor) -> Tensor:
    """Return zeros in the place of a tensor without values; a copy of a real one."""
    if not isinstance(leaf, ShapeOnly):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    last = sum((n - 1) * step for n, step in zip(leaf.shape, leaf.stride(), strict=True))
    memory = torch.zeros(max(last + 1, 0), dtype=leaf.dtype, device=leaf.device)
    zeros = memory.as_strided(leaf.shape, leaf.stride()).detach().requires_grad_(leaf.requires_grad)
    return zeros if leaf.grad_fn is None else zeros.clone()  # a Function may write into it


class _FlopRecorder(TorchDispatchMode):
    """Records the operations whose FLOPs torch counts, with shapes in place of their tensors."""

    def __init__(self, origins: frozenset[str]) -> None:
        super().__init__()
        self._origins = origins
        self.operations: list[tuple[Any, tuple[Any, ...], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.operations.append((func, self._shapes_of(args), self._shapes_of(result)))
        return result

    def _shapes_of(self, tree: Any) -> Any:
        return map_operands(self._shape_of, tree)

    def _shape_of(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        meta = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        return ShapeOnly(meta, leaf.device, self._origins)
