"""Values of other ranks: after the pipeline, and in deep copies.

After its pipeline has ended, a module has shape-only tensors for the values of other ranks. Loading
a state dict replaces them with real tensors, so that any trainer can use the module; a forward
before that raises an error.

Deep copies of the module, as made by callbacks that average weights, have all values until
the module is split. Then each copy keeps the tensors that this rank owns, of those that tensor
ranks share its part, and gets shapes for the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_pipeoffload.runtime.shapes import (
    RemoteTensor,
    Sharding,
    entries_of,
    is_4bit,
    is_shard,
    load_packed,
    local_part,
    map_state,
    params4bit_arguments,
    register_sharding_hooks,
    set_sharding,
    sharding_of,
    sync_layer_quant_state,
)
from lightning_pipeoffload.runtime.users_code import (
    Slot,
    find_slots,
    in_brackets,
    running_user_line,
)


class RemoteTensorHooks:
    """The shape-only tensors in a module whose pipeline has ended.

    Hooks replace them when a state dict is loaded, and refuse a forward before that.
    """

    def __init__(self, module: nn.Module, unsaved: Mapping[str, Tensor]) -> None:
        self._module = module
        self._unsaved = unsaved
        self._shapes = [(slot, slot.tensor) for slot in find_remote_slots(module)]
        self._real: dict[int, Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        for holder in {id(slot.module): slot.module for slot, _ in self._shapes}.values():
            self._hooks.append(
                holder.register_load_state_dict_pre_hook(self._materialize_before_load)
            )
            self._hooks.append(holder.register_forward_pre_hook(self._refuse))

    def restore_shapes(self) -> None:
        """Remove the hooks and put the shapes back, for another pipeline with the module."""
        self._remove_hooks()
        for slot, shape in self._shapes:
            slot.put(shape)

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _materialize_before_load(
        self, holder: nn.Module, state: Mapping[str, Any], prefix: str, *rest: Any
    ) -> None:
        for slot in [s for s in find_remote_slots(self._module) if s.module is holder]:
            loaded: Any = state.get(prefix + slot.attribute)
            if slot.name in self._unsaved:
                slot.put(self._unsaved[slot.name].clone())
            # A tensor of another shape is refused by load_state_dict itself.
            elif getattr(loaded, "shape", None) == slot.tensor.shape:
                entries = entries_of(prefix + slot.attribute, state)
                if entries or not is_4bit(slot.tensor):
                    materialize_slot(slot, self._real)
                if entries:
                    load_packed(slot, loaded, entries)
        self.remove_if_complete()

    def remove_if_complete(self) -> None:
        """Remove the hooks once all tensors have values."""
        if not find_remote_slots(self._module):
            self._remove_hooks()

    def _refuse(self, holder: nn.Module, args: Any) -> None:
        if any(slot.module is holder for slot in find_remote_slots(self._module)):
            raise RuntimeError(format_absent_error(self._module))


def find_remote_slots(module: nn.Module) -> list[Slot]:
    """List the slots of a module that hold shapes."""
    return [slot for slot in find_slots(module) if isinstance(slot.tensor, RemoteTensor)]


def remove_complete_hooks(module: nn.Module) -> None:
    """Remove the :class:`RemoteTensorHooks` of a module that has all its values again."""
    hooks = [hook for part in module.modules() for hook in part._forward_pre_hooks.values()]
    for waiting in [getattr(hook, "__self__", None) for hook in hooks]:
        if isinstance(waiting, RemoteTensorHooks):
            waiting.remove_if_complete()


def materialize_slot(slot: Slot, by_shape: dict[int, Tensor]) -> Tensor:
    """Replace a shape with an uninitialized real tensor.

    Args:
        slot: The slot of the shape.
        by_shape: The tensors made so far, by the id of their shape, which tied weights share.
    """
    shape = slot.tensor
    if id(shape) not in by_shape:
        with torch.inference_mode(False):
            tensor = torch.empty(shape.shape, dtype=shape.dtype)
            if is_4bit(shape):
                kind: Any = type(shape)
                by_shape[id(shape)] = kind.parameter_kind(tensor, **_real_options(shape))
            elif slot.kind == "_parameters":
                by_shape[id(shape)] = nn.Parameter(tensor, shape.requires_grad)
            else:
                by_shape[id(shape)] = tensor
        sharding = sharding_of(shape)
        if sharding is not None:
            set_sharding(by_shape[id(shape)], sharding)
        if isinstance(shape, RemoteTensor):
            shape.record_replacement(by_shape[id(shape)])
    slot.put(by_shape[id(shape)])
    sync_layer_quant_state(slot)
    return by_shape[id(shape)]


def _real_options(shape: Tensor) -> dict[str, Any]:
    options = params4bit_arguments(shape)
    if options["quant_state"] is not None:
        options["quant_state"] = map_state(
            options["quant_state"], lambda scale: torch.empty(scale.shape, dtype=scale.dtype)
        )
    return options


def load_4bit_weights(module: nn.Module, state: Mapping[str, Any], is_split: bool) -> list[str]:
    """Load the 4-bit weights of a state dict with their quantization states.

    ``Module.load_state_dict`` does not know these entries, and Lightning's 4-bit layers leave
    packed weights out.

    Args:
        module: The module, which loads the rest of the state dict afterwards.
        state: The state dict.
        is_split: Whether remote tensors of the module are shapes, which are not loaded.

    Returns:
        The keys of the entries.
    """
    keys: list[str] = []
    by_shape: dict[int, Tensor] = {}
    for slot in find_slots(module):
        entries = entries_of(slot.name, state) if is_4bit(slot.tensor) else {}
        keys += entries
        if entries and isinstance(slot.tensor, RemoteTensor) and not is_split:
            materialize_slot(slot, by_shape)
        if entries and not isinstance(slot.tensor, RemoteTensor):
            load_packed(slot, state[slot.name], entries)
    return keys


def format_absent_error(module: nn.Module) -> str:
    """Return an error that names the tensors a run has left on other ranks, and a remedy."""
    names = [slot.name for slot in find_remote_slots(module)]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"{', '.join(names[:3])}{more} of {type(module).__name__} are on other ranks since it was "
        f"trained over a pipeline; load its checkpoint (ckpt_path=..., or load_state_dict), or "
        f"continue with a pipeline over the same ranks"
    )


_MARK = "_pipeoffload_copies"  # in the __dict__ of each submodule, which a deep copy copies


def is_tracked_copy(module: nn.Module) -> bool:
    """Return whether a :class:`ModuleCopies` tracks ``module``, as an original or a deep copy."""
    return _MARK in vars(module)


class _Mark:
    """Records each deep copy of a submodule when ``copy.deepcopy`` comes to it."""

    # Slots: attributes in __dict__ would be compared before and after a step.
    __slots__ = ("_copied", "_part")

    def __init__(self, part: nn.Module, copied: list[tuple[nn.Module, nn.Module]]) -> None:
        self._part, self._copied = part, copied

    def __deepcopy__(self, memo: dict[int, Any]) -> _Mark | None:
        """Return a mark of the copy, so that copies of it are found as well."""
        copied = memo.get(id(self._part))
        if not isinstance(copied, nn.Module):
            return None
        self._copied.append((self._part, copied))
        return _Mark(copied, self._copied)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as None, since pickles of the module need no tracking."""
        return type(None), ()


class ModuleCopies:
    """Finds the deep copies of a module and of its submodules, until :meth:`stop_tracking`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # Each copy after its original, which may be a copy itself.
        self._copied: list[tuple[nn.Module, nn.Module]] = []
        self.resume()

    def pause(self) -> None:
        """Stop tracking deep copies until :meth:`resume`; constructing a module may copy layers."""
        for part in self._module.modules():
            part.__dict__.pop(_MARK, None)

    def resume(self) -> None:
        """Track deep copies again, of all current submodules."""
        for part in self._module.modules():
            part.__dict__[_MARK] = _Mark(part, self._copied)

    def update_copies(self) -> None:
        """Update the copies: shapes, shards and values where the module has them now."""
        by_tensor: dict[int, Tensor] = {}
        for original, copied in self._pairs():
            shape, of_copy = original.tensor, copied.tensor
            sharding = sharding_of(shape)
            if sharding is not None and _is_whole(of_copy, sharding):
                _put(copied, by_tensor.setdefault(id(of_copy), _part_of(of_copy, sharding)))
                register_sharding_hooks(copied.module, {copied.attribute: sharding})
            elif isinstance(shape, RemoteTensor) and not isinstance(of_copy, RemoteTensor):
                _put(copied, by_tensor.setdefault(id(of_copy), _remote_copy(shape, copied)))
            elif isinstance(of_copy, RemoteTensor) and not isinstance(shape, RemoteTensor):
                _put(copied, by_tensor.setdefault(id(of_copy), _value_like(shape, of_copy)))

    def stop_tracking(self) -> None:
        """Stop tracking copies for good."""
        for part in [*self._module.modules(), *(copied for _, copied in self._copied)]:
            part.__dict__.pop(_MARK, None)
        self._copied.clear()

    def _pairs(self) -> Iterator[tuple[Slot, Slot]]:
        slots: defaultdict[int, list[Slot]] = defaultdict(list)  # by module
        for slot in find_slots(self._module):
            slots[id(slot.module)].append(slot)
        for original, copied in self._copied:
            parts = dict(original.named_modules())
            for path, part in copied.named_modules():
                # What was made after the last mark, and copied, is found by its path.
                if path not in parts or id(part) in slots:
                    continue
                pairs = [
                    (slot, replace(slot, module=part))
                    for slot in slots[id(parts[path])]
                    if part.__dict__[slot.kind].get(slot.attribute) is not None
                ]
                slots[id(part)] = [of_copy for _, of_copy in pairs]
                yield from pairs


def _is_whole(of_copy: Tensor, sharding: Sharding) -> bool:
    """Whether a copy was made before tensor ranks kept their parts of the original."""
    is_of_all = of_copy.shape == sharding.shape and not isinstance(of_copy, RemoteTensor)
    return isinstance(of_copy, DTensor) or (sharding.is_divided and is_of_all)


def _part_of(of_copy: Tensor, sharding: Sharding) -> Tensor:
    is_placed = isinstance(of_copy, DTensor)
    part = (
        local_part(of_copy).detach()
        if is_placed
        else sharding.local_shard_of(of_copy.detach()).clone()
    )
    if isinstance(of_copy, nn.Parameter):
        part = nn.Parameter(part, of_copy.requires_grad)
    set_sharding(part, sharding)
    return part


def _remote_copy(shape: RemoteTensor, copied: Slot) -> Tensor:
    (origin,) = shape.origins
    return RemoteTensor.standing_for(copied, f"a copy of {origin}", copied.tensor.device)


def _value_like(value: Tensor, shape: Tensor) -> Tensor:
    tensor = value.detach().to(shape.device, shape.dtype, copy=True)
    return nn.Parameter(tensor, shape.requires_grad) if isinstance(value, nn.Parameter) else tensor


def _put(slot: Slot, tensor: Tensor) -> None:
    slot.put(tensor)
    hooks = slot.module._forward_pre_hooks  # private: to see what is registered already
    if _refuse_call not in hooks.values():
        slot.module.register_forward_pre_hook(_refuse_call)


def _refuse_call(part: nn.Module, args: Any) -> None:
    """Raise ``RuntimeError`` for a forward of a copy that has shapes, or shards, for values."""
    tensors = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
    if any(isinstance(tensor, RemoteTensor) or is_shard(tensor) for tensor in tensors):
        raise RuntimeError(
            f"a copy of the module that averages its weights has only this rank's part of them "
            f"and cannot run{in_brackets(running_user_line())}: exchange "
            f"its weights with the module's in on_validation_start and on_validation_end, as "
            f"WeightAveraging does, and call the module; or load its checkpoint after training"
        )
