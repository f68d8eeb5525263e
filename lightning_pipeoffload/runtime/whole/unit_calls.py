"""One call of a block: its owner runs it and sends what came of it, the other ranks repeat that."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime import (
    RandomStateSnapshot,
    generator_state,
    leaves_of,
    map_output,
    output_leaves,
)
from lightning_pipeoffload.runtime.comm import PipelineGroup
from lightning_pipeoffload.runtime.shapes import HeldOutput, HeldValue, ShapeOnly
from lightning_pipeoffload.runtime.users_code import Slot
from lightning_pipeoffload.runtime.whole.reached_state import (
    ReachedState,
    ReferencePickler,
    ReferenceUnpickler,
    apply,
)
from lightning_pipeoffload.runtime.whole.values import HeldValues

_SMALL = 16  # numbers of a tensor that travel in the header


class DescribedTensor(NamedTuple):
    """A tensor that a unit made.

    Attributes:
        serial: Its place among those of the same header.
        number: Identifies a value that stays with its holder; 0: all ranks get it now.
        numbers: The contents of a small tensor, else None.
        is_output: Whether the unit has returned it; else it is in what the unit changed.
    """

    serial: int
    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_on_host: bool
    numbers: Any
    is_output: bool

    def on_meta(self) -> Tensor:
        """Return the tensor without memory."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class Unit(NamedTuple):
    """A block, or a module outside of the blocks that is as large.

    Attributes:
        rank: The rank that runs it; None: all do, since it has no tensors.
        is_followed: Whether the block after it has the same owner: then what it returns stays there
            until other code reads it. It does not where forward hooks may read it.
    """

    name: str
    module: nn.Module
    slots: list[Slot]
    rank: int | None
    is_followed: bool = False


class OwnersCall:
    """Runs a unit for all ranks.

    Args:
        values: The values that ranks hold.
        group: The ranks.
        module_names: The names of all modules, by id.
        unit: The unit.
        roots: The arguments and modules that it can change, as :class:`ReachedState` needs them.
        subject: The unit's name, and the checksum of its arguments.

    Attributes:
        shares_state: Whether all ranks get the values of what the unit keeps in its arguments and
            attributes; else these stay on this rank.
    """

    shares_state = False

    def __init__(
        self,
        values: HeldValues,
        group: PipelineGroup,
        module_names: Mapping[int, str],
        unit: Unit,
        roots: Mapping[str, Any],
        subject: tuple[str, int],
    ) -> None:
        self._values, self._group, self._unit = values, group, unit
        self._names, self._roots, self._subject = module_names, roots, subject
        self._described: dict[int, tuple[Tensor, DescribedTensor]] = {}
        self._sent: list[Tensor] = []  # to all ranks, after the header
        self._num_described = 0
        self._stay: dict[int, HeldOutput] = {}  # what is returned in place of an output
        self._leaves: set[int] = set()
        self._is_output = False
        self._keeps_outputs = unit.is_followed and not unit.module._forward_hooks

    def run(self, plain: Callable[..., Any]) -> tuple[Any, RandomStateSnapshot | None]:
        """Return what all ranks return for the call, and the generators if the unit has drawn."""
        state = ReachedState(self._roots)
        args, kwargs = self._roots["args"], self._roots["kwargs"]
        for leaf in leaves_of((args, kwargs)):
            if isinstance(leaf, HeldOutput):  # a unit may return an argument
                self._stay[id(leaf.value)] = leaf
        before = generator_state(self._group.device)
        self._values.begin_unit(self._subject)
        try:
            with torch.inference_mode(False), torch.no_grad():
                output = plain(
                    *map(unwrap_held, args), **{k: unwrap_held(v) for k, v in kwargs.items()}
                )
        finally:
            self._values.end_unit()
        has_drawn = not torch.equal(before, generator_state(self._group.device))
        drawn = RandomStateSnapshot() if has_drawn else None
        self._leaves = {id(leaf) for leaf in output_leaves(output) if isinstance(leaf, Tensor)}
        self._values.send_header(self._subject, result=self._pickled(output, state, drawn))
        for tensor in self._sent:
            self._group.broadcast_to_devices(tensor, self._unit.rank)
        return map_output(lambda leaf: self._stay.get(id(leaf), leaf), output), drawn

    def _pickled(
        self, output: Any, state: ReachedState, drawn: RandomStateSnapshot | None
    ) -> bytes:
        sender = ReferencePickler(state, self._names, self._describe)
        try:
            # First what it keeps: an output among that is a plain tensor here, which code reads
            # without asking the other ranks, so they all get its value.
            sender.dump(state.changes())
            sender.dump((self._describe_writes(state), pickle.dumps(drawn)))
            self._is_output = True
            sender.dump(output)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{self._unit.name} returns or keeps what cannot be pickled ({error}); in a step "
                f"that runs whole and in a hook a block runs on one rank, and the others get what "
                f"it returns and what it changes in its arguments and attributes"
            ) from error
        return sender.file.getvalue()

    def _describe_writes(self, state: ReachedState) -> list[tuple[Tensor, DescribedTensor]]:
        """List the tensors that the unit has written in place, with what others put into them."""
        writes = []
        for tensor, value in state.written():
            stays = isinstance(tensor, HeldOutput) and not tensor.is_everywhere
            if not stays and not self._values.is_registered_state(value):
                writes.append((tensor, self._describe_value(value)))
        return writes

    def _describe(self, tensor: Tensor) -> DescribedTensor:
        if id(tensor) not in self._described:
            self._described[id(tensor)] = tensor, self._describe_new(unwrap_held(tensor))
        return self._described[id(tensor)][1]

    def _describe_new(self, tensor: Tensor) -> DescribedTensor:
        if isinstance(tensor, ShapeOnly):
            raise RuntimeError(
                f"{self._unit.name} returns or keeps a tensor whose value another rank has "
                f"({', '.join(tensor.origins)}), in a step that runs whole or in a hook"
            )
        is_kept, is_leaf = not self._is_output, id(tensor) in self._leaves
        stays = not (is_leaf or self.shares_state) if is_kept else self._keeps_outputs and is_leaf
        if tensor.numel() <= _SMALL or not stays:
            return self._describe_value(tensor)
        number = self._values.next_value_number()
        if is_kept:
            self._values.register_state(number, tensor)
        else:
            origin = f"the output of {self._unit.name}"
            self._stay[id(tensor)] = self._values.make_held_output(
                number, tensor, origin, self._group.rank
            )
        return self._description(tensor, number, None)

    def _describe_value(self, tensor: Tensor) -> DescribedTensor:
        if tensor.numel() <= _SMALL:
            return self._description(tensor, 0, tensor.flatten().tolist())
        self._sent.append(tensor)
        return self._description(tensor, 0, None)

    def _description(self, tensor: Tensor, number: int, numbers: Any) -> DescribedTensor:
        self._num_described += 1
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        is_on_host = tensor.device.type == "cpu"
        return DescribedTensor(
            self._num_described,
            number,
            shape,
            stride,
            tensor.dtype,
            is_on_host,
            numbers,
            self._is_output,
        )


class RemoteUnitCall:
    """Repeats a call that another rank runs.

    Args:
        values: The values that ranks hold.
        group: The ranks.
        module: The user's module.
        unit: The unit.
        roots: The arguments and modules that it can change.
        subject: The unit's name, and the checksum of its arguments.
    """

    def __init__(
        self,
        values: HeldValues,
        group: PipelineGroup,
        module: nn.Module,
        unit: Unit,
        roots: Mapping[str, Any],
        subject: tuple[str, int],
    ) -> None:
        self._values, self._group, self._module = values, group, module
        self._unit, self._roots, self._subject = unit, roots, subject
        self._made: dict[int, Tensor] = {}

    def receive(self) -> tuple[Any, RandomStateSnapshot | None]:
        """Repeat what the unit has changed; return as :meth:`OwnersCall.run` does."""
        assert self._unit.rank is not None
        data = self._values.receive_result(self._subject, self._unit.rank)
        receiver = ReferenceUnpickler(data, self._roots, self._module, self._make)
        # Values come in this order. Objects are found where they were before the changes.
        changes = receiver.load()
        writes, generators = receiver.load()
        for tensor, described in writes:
            _write_if_present(tensor, self._receive_tensor(described))
        output = receiver.load()
        for change in changes:
            apply(change)
        self._call_hooks(output)
        return output, pickle.loads(generators)

    def _call_hooks(self, output: Any) -> None:
        """Call the unit's forward hooks, which the owner has called: they may collect outputs."""
        module, args, kwargs = self._unit.module, self._roots["args"], self._roots["kwargs"]
        for key, hook in module._forward_hooks.items():  # private: there is no other way to them
            if key in module._forward_hooks_with_kwargs:
                hook(module, args, kwargs, output)
            else:
                hook(module, args, output)

    def _make(self, described: DescribedTensor) -> Tensor:
        if described.serial not in self._made:
            make = self._make_held if described.number else self._receive_tensor
            self._made[described.serial] = make(described)
        return self._made[described.serial]

    def _make_held(self, described: DescribedTensor) -> Tensor:
        assert self._unit.rank is not None
        number, name = self._values.next_value_number(), self._unit.name
        device = torch.device("cpu") if described.is_on_host else self._group.device
        if described.is_output:
            origin = f"the output of {name}"
            return self._values.make_held_output(
                number, described.on_meta(), origin, self._unit.rank, device
            )
        place = f"global rank {self._group.global_ranks[self._unit.rank]}"
        origin = f"what {name} keeps in its arguments or attributes, on {place}"
        return self._values.make_held_state(
            number, described.on_meta(), origin, self._unit.rank, device
        )

    def _receive_tensor(self, described: DescribedTensor) -> Tensor:
        assert self._unit.rank is not None
        shape, dtype, device = described.shape, described.dtype, self._group.device
        if described.numbers is None:
            value = self._group.broadcast_to_devices(described.on_meta(), self._unit.rank)
        else:
            value = torch.tensor(described.numbers, dtype=dtype, device=device).reshape(shape)
        value = value.cpu() if described.is_on_host else value
        if value.stride() == described.stride:
            return value
        strided = torch.empty_strided(shape, described.stride, dtype=dtype, device=value.device)
        return strided.copy_(value)


def unwrap_held(leaf: Any) -> Any:
    """Return the value of a held tensor where it is on this rank; other objects as they are."""
    return leaf.value if isinstance(leaf, HeldValue) and leaf.value is not None else leaf


def _write_if_present(tensor: Tensor, value: Tensor) -> None:
    """Repeat a write in place, where this rank has a value."""
    written = unwrap_held(tensor)
    if not isinstance(written, ShapeOnly):
        written.copy_(value)
