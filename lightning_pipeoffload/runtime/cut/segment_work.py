"""The work of each segment of a step: floating-point operations, and digests of all operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lightning_pipeoffload.runtime import leaves_of
from lightning_pipeoffload.runtime.cut.call_checks import is_in_autograd_function
from lightning_pipeoffload.runtime.cut.observers import Observer, Operation, RunningTrace
from lightning_pipeoffload.runtime.cut.record_part import BY_LENGTHS, RecordPart
from lightning_pipeoffload.runtime.shapes import ShapeOnly, refuse_weight_on_shard

aten = torch.ops.aten

_PRIME, _FACTOR = (1 << 61) - 1, 1_000_000_007
_PLAIN = (bool, float, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size)
_WHOLE = {aten.linear, aten.conv1d, aten.conv2d, aten.conv3d}
# Which of these an operation such as reshape makes depends on strides.
_BY_LAYOUT = {f"aten.{name}.default" for name in ("view", "_unsafe_view", "clone")}
_SHORT = 0.1  # of F's operations


class SegmentDigest(NamedTuple):
    """A digest of a segment's operations that is equal in all processes."""

    form: str  # a digest of all but numbers
    sizes: int  # a weighted sum of the whole numbers
    others: str  # a digest of the other numbers


_NOTHING = SegmentDigest("", 0, "")


@dataclass
class SegmentWork(RecordPart):
    """The work of one microbatch, as a part of a step's record.

    Attributes:
        forward_flops: The floating-point operations of each segment.
        input_flops: Those of each segment's B.
        weight_flops: Those of each segment's weight gradients.
        training_flops: Those of the whole step, forward and backward.
        digests: A digest of each segment's operations and their arguments.
        between: A digest of the operations outside of the blocks.
    """

    forward_flops: list[int] = field(default_factory=list, metadata=BY_LENGTHS)
    input_flops: list[int] = field(default_factory=list, metadata=BY_LENGTHS)
    weight_flops: list[int] = field(default_factory=list, metadata=BY_LENGTHS)
    training_flops: int = field(default=0, metadata=BY_LENGTHS)
    digests: list[SegmentDigest] = field(default_factory=list, metadata=BY_LENGTHS)
    between: SegmentDigest = field(default=_NOTHING, metadata=BY_LENGTHS)

    @classmethod
    def empty(cls, num_segments: int) -> SegmentWork:
        """Return no work of so many segments."""
        return cls([0] * num_segments, [0] * num_segments, [0] * num_segments)

    def has_short_weight_grad(self, segment: int) -> bool:
        """Return whether W of a segment is too short to be worth the memory of deferring it."""
        return 0 < self.weight_flops[segment] < _SHORT * self.forward_flops[segment]


class WorkBetween(Observer[SegmentWork]):
    """Finds the digest of the operations outside of the blocks."""

    def __init__(self, trace: RunningTrace, work: SegmentWork) -> None:
        super().__init__(trace, work)
        self._hash = _WorkHash(1)

    def record_below_autograd(self, operation: Operation) -> None:
        if not self._trace.is_in_call and str(operation.func) not in _BY_LAYOUT:
            self._hash.add(0, str(operation.func), (operation.args, operation.kwargs))

    @contextmanager
    def recording(self) -> Iterator[None]:
        try:
            yield
        finally:
            (self._part.between,) = self._hash.digests


class WorkObserver(Observer[SegmentWork]):
    """Counts and digests the work of the segments; marks what is computed from weights alone."""

    def __init__(self, trace: RunningTrace, work: SegmentWork) -> None:
        super().__init__(trace, work)
        self._hash = _WorkHash(len(work.forward_flops))
        self._training = torch.is_grad_enabled()
        self._is_in_chunks = False

    def before_block(self, index: int, arguments: Any) -> None:
        self._hash.add(index, "a block", arguments)

    def record_kernel(self, name: str, arguments: Any) -> None:
        self._hash.add(self._trace.point.segment, name, arguments)

    def record_below_autograd(self, operation: Operation) -> None:
        self._hash.add(operation.segment, str(operation.func), (operation.args, operation.kwargs))

    def record_operation(self, operation: Operation) -> None:
        func, args, _, result, segment = operation
        tensors = [leaf for leaf in leaves_of(args) if isinstance(leaf, Tensor)]
        weights = [getattr(tensor, "is_weight", False) for tensor in tensors]
        if self._trace.stripped.has_shards and any(weights):
            refuse_weight_on_shard(tensors, weights)
        for leaf in leaves_of(result):
            if isinstance(leaf, ShapeOnly):
                leaf.is_weight = all(weights)  # type: ignore[attr-defined]
        flops = count_flops(func, args, result)
        if flops:
            trains = any(t.requires_grad for t, w in zip(tensors, weights, strict=True) if w)
            self._count(segment, flops, trains, weights, not self._is_frozen(tensors))

    def _is_frozen(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a product of training has no gradient."""
        if not self._training:
            return False
        if not any(tensor.requires_grad for tensor in tensors):
            return True
        # The forward of an autograd function runs without gradients, and has a backward.
        return not (torch.is_grad_enabled() or is_in_autograd_function())

    def _count(
        self, segment: int, flops: int, trains: bool, weights: list[bool], has_backward: bool
    ) -> None:
        """Add the work of a product and of its gradients: one per operand that trains."""
        work = self._part
        work.forward_flops[segment] += flops
        if not has_backward:
            work.training_flops += flops
            return
        for_weight = flops if trains and not all(weights) else 0
        num_gradients = 2 if trains or not any(weights) else 1
        for_input = flops * num_gradients - for_weight
        work.training_flops += flops + self._training * (for_input + for_weight)
        if self._is_in_chunks:  # B runs them again, and does the work of W
            for_input, for_weight = flops + for_input + for_weight, 0
        work.input_flops[segment] += for_input
        work.weight_flops[segment] += for_weight

    @contextmanager
    def around_loss_chunks(self) -> Iterator[None]:
        """Count the operations within the context as those of a loss's chunks."""
        self._is_in_chunks = True
        try:
            yield
        finally:
            self._is_in_chunks = False

    def finish(self) -> None:
        self._part.digests = self._hash.digests


def count_flops(func: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> int:
    """Return the floating-point operations of a product, convolution or attention; else 0."""
    packet = func.overloadpacket
    # Torch has no formula for all of these.
    if packet.__name__.lstrip("_").startswith("scaled_dot_product"):
        query, key, value = args[:3]
        num_queries, num_keys = query.shape[-2], key.shape[-2]
        pairs = num_queries * num_keys
        names = [argument.name for argument in func._schema.arguments]
        if dict(zip(names, args, strict=False)).get("is_causal"):
            seen = min(num_queries, num_keys)  # kernels skip what no query sees
            pairs = seen * (seen + 1) // 2 + (num_queries - seen) * num_keys
        return int(2 * query.shape[:-2].numel() * pairs * (query.shape[-1] + value.shape[-1]))
    if packet in _WHOLE:  # as they arrive in inference mode, where torch takes none of them apart
        return int(2 * result.numel() * args[1].shape[1:].numel())
    if packet is aten.matmul:
        return int(2 * result.numel() * args[0].shape[-1])
    if packet is torch.ops.aten._grouped_mm:  # each row of the left with its group's matrix
        return int(2 * args[0].numel() * args[1].shape[-1])
    if packet.__name__ == "gemm_4bit":  # of bitsandbytes, whose weight is packed
        return int(2 * result.numel() * args[0].shape[-1])
    formula = flop_registry.get(packet)
    return int(formula(*args, out_val=result)) if formula else 0


class _WorkHash:
    """Hashes the work of each segment of a step: its operations and their arguments."""

    def __init__(self, num_segments: int) -> None:
        self._forms = [sha256() for _ in range(num_segments)]
        self._others = [sha256() for _ in range(num_segments)]
        self._sizes = [0] * num_segments
        self._factors = [1] * num_segments

    @property
    def digests(self) -> list[SegmentDigest]:
        columns = zip(self._forms, self._sizes, self._others, strict=True)
        return [SegmentDigest(f.hexdigest(), sizes, o.hexdigest()) for f, sizes, o in columns]

    def add(self, segment: int, name: str, values: Any) -> None:
        """Add the name of an operation or block, and its arguments, to the hashes of a segment."""
        form: list[Any] = [name]
        sizes: list[int] = []
        others: list[Any] = []
        with torch._C.DisableTorchFunction():  # private: this is no call of the step's
            for leaf in leaves_of(values):
                if isinstance(leaf, Tensor):
                    sizes += leaf.shape
                    form += leaf.dim(), *tensor_options(leaf)
                elif type(leaf) is int:
                    sizes.append(leaf)
                    form.append(int)
                elif isinstance(leaf, torch.Size):
                    sizes += leaf
                    form.append(len(leaf))
                elif isinstance(leaf, (float, complex)):
                    others.append(leaf)
                    form.append(float)
                else:
                    form.append(leaf if isinstance(leaf, (int, *_PLAIN)) else type(leaf).__name__)
        self._forms[segment].update(repr(form).encode())
        if others:
            self._others[segment].update(repr(others).encode())
        self._add_sizes(segment, sizes)

    def _add_sizes(self, segment: int, sizes: list[int]) -> None:
        """Add the numbers to a checksum, each times a pseudo-random factor.

        It is a plain sum, so where each number is a polynomial of the lengths, so is the checksum,
        and derived_records can compute it.
        """
        factor, total = self._factors[segment], self._sizes[segment]
        for size in sizes:
            factor = factor * _FACTOR % _PRIME
            total += factor * size
        self._factors[segment], self._sizes[segment] = factor, total


def tensor_options(tensor: Tensor) -> tuple[Any, ...]:
    """Return all of a tensor's form but its shape."""
    return str(tensor.dtype), tensor.device.type, tensor.requires_grad
