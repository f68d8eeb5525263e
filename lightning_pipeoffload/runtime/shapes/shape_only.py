"""Tensors that have a shape, a dtype and a device, but no value.

A stage runs the user's whole step although it owns only some of the parameters. The others are
shape-only: operations on them yield shape-only results, so that the code before the stage's first
block runs unchanged. Code that reads a missing value raises an error that names it, where zeros or
NaN would silently give wrong numbers. ``FakeTensor`` is similar, but needs a mode around everything
and does not record origins.
"""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map  # private: see runtime/leaves
from torch.utils.hooks import RemovableHandle

from lightning_pipeoffload.runtime import leaves_of, map_operands
from lightning_pipeoffload.runtime.shapes.finite_checks import finite_check_outcome, is_order
from lightning_pipeoffload.runtime.shapes.operations import (
    FACTORIES,
    RESULTS,
    advance_generator,
    call_factory,
    clear_conj_neg_bits,
    goes_member_by_member,
    is_ordinary,
    lengths_argument_index,
    result_cache_key,
    run_members,
    run_on_meta,
    written_arguments,
)
from lightning_pipeoffload.runtime.shapes.sharding import OF_SHARD
from lightning_pipeoffload.runtime.shapes.step_rules import (
    RULES,
    AddressNeededError,
    ValueNeededError,
    assume_sizes,
    assume_value,
    describe_origins,
    fit_split_sizes,
    has_observer,
    is_dropped,
    is_mask,
    make_result,
    notify_observer,
)

_SAVED = (
    "torch.save() has written shapes without values for the weights of other ranks: "
    "trainer.save_checkpoint(path), called on all ranks, writes all values, and "
    "trainer.strategy.gather(parameter) returns the value of one"
)
_ORIGINS = attrgetter("origins")
_NUM_OWN = 2  # attributes of a ShapeOnly: its meta tensor and its origins
_ASKS_FOR_ADDRESSES = {nn.modules.rnn.__name__, "torch.cuda._sanitizer"}

aten = torch.ops.aten


class ShapeOnly(Tensor):
    """A tensor without a value.

    Args:
        meta: A tensor on the meta device, which has the shape, strides and dtype.
        device: The device that it reports.
        origins: Names of the parameters and block outputs that it was computed from.

    Attributes:
        outcome: Each element in a trace, if it says whether values are finite; else None.
        is_order: Whether its elements say, in a trace, which of two values is larger.
    """

    meta: Tensor
    origins: frozenset[str]
    outcome: float | None = None
    is_order = False

    @staticmethod
    def __new__(
        cls,
        meta: Tensor,
        device: torch.device,
        origins: frozenset[str],
        requires_grad: bool = False,
    ) -> ShapeOnly:
        # Private: a third of the cost of torch.inference_mode. A view of a remote parameter, which
        # is no inference tensor, must be none either.
        with torch._C._InferenceMode(False):
            # Private: the only way to make a tensor that has a device but no storage.
            tensor: ShapeOnly = Tensor._make_wrapper_subclass(
                cls,
                meta.shape,
                strides=meta.stride(),
                storage_offset=meta.storage_offset(),
                dtype=meta.dtype,
                layout=meta.layout,
                device=device,
                requires_grad=requires_grad,
            )
        # Private: kernels in C++ would get a null pointer without asking Python.
        torch._C._set_throw_on_mutable_data_ptr(tensor)
        tensor.meta = meta
        tensor.origins = origins
        return tensor

    @classmethod
    def like(
        cls,
        tensor: Tensor,
        origin: str,
        requires_grad: bool = False,
        device: torch.device | None = None,
    ) -> ShapeOnly:
        """Make the shape-only counterpart of ``tensor``, on another device if given."""
        device = tensor.device if device is None else device
        return cls(_to_meta(tensor), device, frozenset((origin,)), requires_grad)

    def is_unmodified(self, meta: Tensor) -> bool:
        """Return whether the tensor is unchanged since it was constructed from ``meta``."""
        is_written = self._version or self.requires_grad or self.meta is not meta
        return not is_written and len(self.__dict__) == _NUM_OWN

    def __deepcopy__(self, memo: dict[int, Any]) -> ShapeOnly:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the shape and the origins."""
        _warn_of_saving()
        arguments = self.meta, self.device, self.origins, self.requires_grad
        kind = getattr(self, "pickled_kind", type(self))  # one that is made as needed has no name
        return _rebuild, (kind, arguments, self.__dict__.get("_is_param", False))

    @property
    def data(self) -> Tensor:
        """The same tensor, detached."""
        detached: Tensor = Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return detached

    @data.setter
    def data(self, value: Tensor) -> None:
        """Set the dtype, device and shape to those of ``value``."""
        _notify_write(self, value if isinstance(value, ShapeOnly) else self)
        if not isinstance(value, ShapeOnly):
            value = ShapeOnly(_to_meta(value), self.device, self.origins)
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.meta = value.meta

    def update_origins_on_write(self, origins: frozenset[str]) -> None:
        """Set the origins after a write in place."""
        self.origins = origins

    def __repr__(self, *, tensor_contents: None = None) -> str:  # type: ignore[override]
        return f"ShapeOnly({tuple(self.shape)}, {self.dtype}, {describe_origins(self.origins)})"

    def __format__(self, format_spec: str) -> str:
        if not format_spec:
            return repr(self)
        return format(self._assumed(f"the format {format_spec!r}"), format_spec)

    def data_ptr(self) -> int:
        """Raise ``AddressNeededError``: a custom kernel would read memory that is not there.

        torch's RNNs, which check whether their weights are contiguous, and its sanitizer get 0.
        """
        if sys._getframe(1).f_globals.get("__name__") in _ASKS_FOR_ADDRESSES:
            return 0
        raise AddressNeededError(self.origins)

    def storage(self) -> Any:
        """Raise ``ValueNeededError``: safetensors calls this method before it writes a value."""
        raise ValueNeededError("a file of safetensors", self.origins)

    def tolist(self) -> Any:
        """Return made-up values where the step's rules allow it; else raise ValueNeededError."""
        return self._assumed("tolist()").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return made-up values as :meth:`tolist` does; else raise ValueNeededError."""
        return self._assumed("numpy()").numpy()

    def register_hook(self, hook: Callable[[Tensor], Any]) -> RemovableHandle:
        """Register the hook if the tensor requires a gradient; else ignore it on this stage."""
        if self.requires_grad:
            handle: RemovableHandle = super().register_hook(hook)
            return handle
        return RemovableHandle(OrderedDict())

    def retain_grad(self) -> None:
        """Retain the gradient if the tensor requires one; else do nothing on this stage."""
        if self.requires_grad:
            super().retain_grad()

    def _assumed(self, operation: str) -> Tensor:
        assumed = assume_value(operation, self.origins)
        notify_observer(aten._local_scalar_dense.default, (self,), None)
        value: float | None = self.outcome
        if value is None:
            value = assumed.flag if self.dtype == torch.bool else 1
        return torch.full(self.shape, value, dtype=self.dtype)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Return the shape-only result of ``func``, which runs on meta tensors.

        The ``origins`` of the result, the names of the tensors that it was computed from, are the
        union of those of the arguments. A factory such as ``zeros_like`` returns a real tensor.

        Raises:
            ValueNeededError: The operation reads a missing value, or writes one into a real tensor.
        """
        kwargs = kwargs or {}
        cached = _cached_result(func, args, kwargs)
        if cached is not None:
            return cached
        if goes_member_by_member(func, args):
            return run_members(func, args, kwargs, has_shape_only)
        shape_only = shape_only_leaves((args, kwargs))
        device = kwargs.get("device") or shape_only[0].device
        if func.overloadpacket in FACTORIES and not _is_scratch_of_traced_block(func):
            drawn: Any = call_factory(func, device, args, kwargs)
            if origins_of(shape_only) >= OF_SHARD and drawn.shape == args[0].shape:
                drawn.origins = OF_SHARD  # a mask that is drawn there is for the shard
            return drawn
        origins = origins_of(shape_only)
        if func is aten._local_scalar_dense.default:
            return args[0]._assumed("a branch, a print or item()").flatten()[0].item()
        func, args = _masks_to_indices(func, args)
        args = fit_split_sizes(func, args)
        assumed = assume_sizes(func, args, origins)
        _refuse_writes_to_real(func, args, kwargs, origins)
        # Random numbers are not used while operations are only observed, and may take much memory;
        # but the trace has to observe that a generator of the user's advances.
        is_seen = not has_observer() or kwargs.get("generator") is not None
        if torch.Tag.nondeterministic_seeded in func.tags and is_seen:
            advance_generator(func, args, kwargs, device)
        if torch.Tag.inplace_view in func.tags:
            args[0].meta = args[0].meta.detach()  # others may have the same one
        on_meta = _operands_on_meta(func, args), _kwargs_on_meta(kwargs)
        if assumed is None:  # observers compare the memory of results
            out = run_on_meta(func, *on_meta, device, in_new_memory=has_observer())
        else:
            out = make_result(func, *on_meta)
        result = _wrap(func, args, out, device, origins)
        _refuse_reduction_in_hook(func, shape_only, result)
        _record_outcome(func, args, result)
        notify_observer(func, args, result)
        for written in shape_only_leaves(kwargs.get("out")):
            _notify_write(written, written)
        return result


def _is_scratch_of_traced_block(func: torch._ops.OpOverload) -> bool:
    """Return whether an operation makes empty memory in a block that is traced.

    Dropout draws its mask there: of an attention that would be heads x length x length numbers.
    """
    is_empty = func.overloadpacket is aten.empty_like
    return is_empty and has_observer() and is_dropped(torch.empty(0))


def _cached_result(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the cached result for the same shapes; None if the operation needs more work."""
    # As has_observer() decides: an F has many operations before its first block.
    if not is_ordinary(func) or (RULES and RULES[-1].observe is not None):
        return None
    operands: list[ShapeOnly] = []
    metas: list[Any] = []
    for leaf in args:
        if isinstance(leaf, ShapeOnly):
            operands.append(leaf)
        metas.append(leaf.meta if isinstance(leaf, ShapeOnly) else leaf)
    if kwargs:
        operands += shape_only_leaves(kwargs)
    cached = RESULTS.get(
        result_cache_key(func, metas, _kwargs_on_meta(kwargs) if kwargs else kwargs)
    )
    if cached is None:
        return None
    origins, device = operands[0].origins, kwargs.get("device") or operands[0].device
    if len(operands) > 1:
        origins = origins_of(operands)
    if isinstance(cached, Tensor):  # as most operations return
        result: Any = ShapeOnly(cached, device, origins)
    else:
        result = _wrap_new(cached, device, origins)
    if not RULES:
        _refuse_reduction_in_hook(func, operands, result)
    return result


def _record_outcome(func: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> None:
    if not (has_observer() and isinstance(result, ShapeOnly)):
        return
    operands = [leaf for leaf in leaves_of(args) if isinstance(leaf, Tensor)]
    known = [leaf.outcome if isinstance(leaf, ShapeOnly) else None for leaf in operands]
    result.outcome = finite_check_outcome(func, args, known, result)
    result.is_order = is_order(func)


def _notify_write(tensor: ShapeOnly, value: ShapeOnly) -> None:
    """Report a write that the arguments of no operation show."""
    notify_observer(aten.set_.source_Tensor, (tensor, value), None)


def shape_only_leaves(tree: Any) -> list[ShapeOnly]:
    """List the shape-only tensors in a pytree."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, ShapeOnly)]


def origins_of(leaves: Iterable[ShapeOnly]) -> frozenset[str]:
    """Return the origins of a tensor that is computed from all of ``leaves``."""
    return frozenset[str]().union(*map(_ORIGINS, leaves))


def storage_key(tensor: Tensor) -> int:
    """Return a number that is equal for two tensors that share memory."""
    holder = tensor.meta if isinstance(tensor, ShapeOnly) else tensor
    if holder.layout is not torch.strided:
        return id(holder)
    return storage_of(holder)._cdata  # private: the address, also of storages without memory


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor, or of the meta tensor of a shape-only one."""
    return (tensor.meta if isinstance(tensor, ShapeOnly) else tensor).untyped_storage()


def has_shape_only(tree: Any) -> bool:
    """Return whether a pytree contains shape-only tensors."""
    return bool(shape_only_leaves(tree))


def _rebuild(kind: type[ShapeOnly], arguments: tuple[Any, ...], is_param: bool) -> ShapeOnly:
    rebuilt = kind(*arguments)
    if is_param:
        rebuilt._is_param = True
    return rebuilt


def _to_meta(leaf: Any) -> Any:
    if isinstance(leaf, ShapeOnly):
        return leaf.meta
    if isinstance(leaf, Tensor) and leaf.device.type != "meta":
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return leaf


def _operands_on_meta(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> Any:
    on_meta, place = map_operands(_to_meta, args), lengths_argument_index(func)
    if place is None:
        return on_meta
    lengths = args[place]
    if isinstance(lengths, ShapeOnly):  # computed by another stage, not the batch's
        lengths = lengths._assumed(f"{func.overloadpacket.__name__.strip('_')}()")
    return *on_meta[:place], lengths, *on_meta[place + 1 :]


def _kwargs_on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    kwargs = {name: map_operands(_to_meta, value) for name, value in kwargs.items()}
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("meta")
    return kwargs


def _masks_to_indices(
    func: torch._ops.OpOverload, args: tuple[Any, ...]
) -> tuple[torch._ops.OpOverload, tuple[Any, ...]]:
    """Replace real masks with indices, whose number is known."""
    if func is aten.masked_select.default and not isinstance(args[1], ShapeOnly):
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in args))
        func, args = aten.index.Tensor, (args[0].expand(shape), [args[1].expand(shape)])
    if func is aten.index.Tensor:
        args = (args[0], [place for index in args[1] for place in _places_in(index)])
    return func, args


def _places_in(index: Any) -> Sequence[Any]:
    is_known = is_mask(index) and not isinstance(index, ShapeOnly)
    return index.nonzero().unbind(1) if is_known else (index,)


def _refuse_writes_to_real(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    origins: frozenset[str],
) -> None:
    """Refuse to write a missing value into a real tensor, unless the write is dropped."""
    for value in written_arguments(func, args, kwargs):
        is_real = isinstance(value, Tensor) and not isinstance(value, ShapeOnly)
        if is_real and not is_dropped(value):
            name = func.overloadpacket.__name__
            raise ValueNeededError(f"{name}() into a tensor of this stage", origins)


def _refuse_reduction_in_hook(
    func: torch._ops.OpOverload, operands: Sequence[ShapeOnly], result: Any
) -> None:
    """Refuse reductions to one number in hooks, which would use or log the number."""
    if RULES or not isinstance(result, ShapeOnly) or result.dim():
        return
    is_view = func._schema.returns[0].alias_info is not None
    if not is_view and any(leaf.dim() for leaf in operands):
        raise ValueNeededError(f"{func.overloadpacket.__name__}()", operands[0].origins)


def _wrap(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    out: Any,
    device: torch.device,
    origins: frozenset[str],
) -> Any:
    if func._schema.name.endswith("_") and args and isinstance(args[0], ShapeOnly):
        args[0].update_origins_on_write(origins)
        return args[0]

    return _wrap_new(out, device, origins)


def _wrap_new(out: Any, device: torch.device, origins: frozenset[str]) -> Any:
    if isinstance(out, Tensor):  # as most operations return
        return ShapeOnly(clear_conj_neg_bits(out), device, origins)

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_meta:  # lengths of packed sequences are real
            return leaf
        return ShapeOnly(clear_conj_neg_bits(leaf), device, origins)

    return map_operands(wrap, out)


def _warn_of_saving() -> None:
    """Warn if ``torch.save`` calls ``__reduce_ex__``: the file would lack the weights."""
    pickler = sys._getframe(2)
    if pickler.f_globals.get("__name__") == "torch.serialization":
        warnings.warn(_SAVED, stacklevel=5)


class Awaited(ShapeOnly):
    """A shape-only tensor that later receives the value that an earlier stage sends.

    The step may hold it in variables, lists and attributes, where it cannot be replaced. So once it
    has a value, each torch function that gets it is called with the value instead. This needs
    ``__torch_function__``, a Python call per operation, which other shape-only tensors avoid.
    """

    value: Tensor | None = None

    @classmethod
    def of(cls, leaf: ShapeOnly) -> Awaited:
        """Return a tensor that replaces ``leaf``, and can receive a value."""
        stand_in = cls(leaf.meta, leaf.device, leaf.origins)
        assert isinstance(stand_in, Awaited)
        return stand_in

    def receive(self, value: Tensor) -> None:
        """Set the value, which replaces this tensor in later torch functions."""
        if value.requires_grad:
            _LinkToStandIn.apply(value, self)
        self.value = value

    def __format__(self, format_spec: str) -> str:
        return (
            super().__format__(format_spec)
            if self.value is None
            else format(self.value, format_spec)
        )

    def data_ptr(self) -> int:
        """Return the address of the received value; without it, raise ``AddressNeededError``."""
        return super().data_ptr() if self.value is None else self.value.data_ptr()

    def tolist(self) -> Any:
        """Return the received values; without them, as :class:`ShapeOnly` does."""
        return super().tolist() if self.value is None else self.value.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the received values; without them, as :class:`ShapeOnly` does."""
        return super().numpy() if self.value is None else self.value.numpy(force=force)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Call ``func`` with received values in place of stand-ins."""
        with torch._C.DisableTorchFunctionSubclass():
            given = substitute_values((args, kwargs or {}))
            return func(*given[0], **given[1])


def substitute_values(tree: Any, map_leaves: Callable[..., Any] = tree_map) -> Any:
    """Replace stand-ins with their received values."""
    for leaf in leaves_of(tree):
        if isinstance(leaf, Awaited):
            return map_leaves(_value_of, tree)
    return tree


def _value_of(leaf: Any) -> Any:
    is_there = isinstance(leaf, Awaited) and leaf.value is not None
    return leaf.value if is_there else leaf


class _LinkToStandIn(torch.autograd.Function):
    r"""Passes gradients of a stand-in to its value, for the user's ``autograd.Function``\ s."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, stand_in: Tensor) -> Tensor:
        ctx.mark_dirty(stand_in)
        return stand_in

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
