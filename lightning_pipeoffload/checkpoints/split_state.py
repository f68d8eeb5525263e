"""State dicts of a module and its optimizers, over the ranks once the module is split.

Keys are those of the plain module, and an optimizer's state has the layout of the plain optimizer.
So a checkpoint loads into the plain module and into a pipeline of another size.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeoffload.checkpoints.file import state_dict_of
from lightning_pipeoffload.checkpoints.saved_values import picklable_shapes, to_shape_only
from lightning_pipeoffload.checkpoints.shards import (
    join_optimizer_state,
    join_shards,
    shard_optimizer_state,
    shards_in,
)
from lightning_pipeoffload.optimizers import (
    GroupNames,
    MasterWeights,
    OptimizedParameters,
    load_optimizer_state,
    move_state_to_parameters,
    name_optimizer_state,
    number_optimizer_state,
    plain_state_dict,
    read_stored_states,
    replace_group_params,
)
from lightning_pipeoffload.runtime.comm import HostGroup, PipelineGroup, reporting_lost_peers
from lightning_pipeoffload.runtime.cut import (
    find_remote_slots,
    format_absent_error,
    load_4bit_weights,
    materialize_slot,
    remove_complete_hooks,
)
from lightning_pipeoffload.runtime.run import Pipeline
from lightning_pipeoffload.runtime.shapes import ShapeOnly, copy_quant_state
from lightning_pipeoffload.runtime.users_code import find_slots


def unsplit_state_dict(
    module: nn.Module, masters: MasterWeights | None, is_global_zero: bool
) -> dict[str, Any]:
    """Return the state dict of a module that no batch has split yet: that of global rank 0."""
    # Without a seed the ranks' modules differ until they are split.
    state: dict[str, Any] = module.state_dict()
    if masters is not None:
        masters.replace_in_state_dict(state, module)
    return state if is_global_zero else to_shape_only(state, global_rank=0)


def load_unsplit(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load a state dict into a module that no batch has split yet."""
    loaded = load_4bit_weights(module, state, is_split=False)
    plain = copy.copy(state)  # with its attribute: the versions that modules load by
    for key in loaded:
        del plain[key]  # type: ignore[attr-defined]
    module.load_state_dict(plain, strict=strict)


class SplitState:
    """One rank's state dicts of a module that has stages, and its optimizers.

    Args:
        pipeline: This rank's part of the module.
        parameters: The parameters of the optimizers.
        masters: The master weights, which are saved in place of parameters; None: there are none.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        parameters: OptimizedParameters,
        masters: MasterWeights | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._parameters, self._masters = parameters, masters
        self._group = pipeline.group

    @property
    def is_split(self) -> bool:
        """Whether this rank has only its part of the module."""
        return self._pipeline.is_split

    def module_state_dict(self, in_shards: bool) -> dict[str, Any]:
        """Return the state dict under the plain module's keys, in its order.

        Tensors that another rank writes are shape-only. With ``in_shards`` each tensor rank writes
        its part of a layer that they share; else one of them the whole.
        """
        part = self._local_entries(in_shards)
        ranks: HostGroup = self._group
        if self._masters is not None and self._group.num_replicas > 1:
            ranks = self._group.world  # which may step some of the masters each
        shards = shards_in(part, self._pipeline.module) if in_shards else {}
        part.update(shards)
        # Of shards each tensor rank writes its own.
        entries = self._gather_entries(part, ranks) | shards
        order = {name: index for index, name in enumerate(self._pipeline.tensors.names)}
        names = sorted(entries, key=lambda name: order.get(name, len(order)))
        return state_dict_of({name: entries[name] for name in names}, like=part)

    def _local_entries(self, in_shards: bool) -> OrderedDict[str, Any]:
        """Return the entries that this rank can write: those of its stages and of no stage."""
        state = versioned = self._pipeline.module.state_dict()
        owners = {name: self._pipeline.tensors.owner_of(name) for name in state}
        if self._masters is not None:
            kept = self._pipeline.module.state_dict(keep_vars=True)
            of_others = [
                n
                for n, value in kept.items()
                if self._parameters.is_updated_by_other_replica(value)
            ]
            state = {name: value for name, value in state.items() if name not in of_others}
        part = {
            name: value
            for name, value in state.items()
            if owners[name] in (None, self._group.rank) and not isinstance(value, ShapeOnly)
        }
        if self._masters is not None:
            self._masters.replace_in_state_dict(part, self._pipeline.module)
        if self._group.num_tensor_ranks > 1 and not in_shards:
            join_shards(part, self._pipeline.module, self._group)
        return state_dict_of(part, like=versioned)

    def _gather_entries(self, mine: dict[str, Any], ranks: HostGroup) -> dict[str, Any]:
        """Return the entries of some ranks, with values on the lowest rank that has them."""
        global_rank = self._group.global_rank
        entries: dict[str, Any] = {}
        listed = dict(ranks.gather((global_rank, picklable_shapes(mine, global_rank))))
        for rank in sorted(listed, reverse=True):
            entries |= mine if rank == global_rank else listed[rank]
        return entries

    def optimizer_state_dict(self, optimizer: Optimizer, by_name: bool) -> dict[str, Any]:
        """Return the plain optimizer's state, with shapes for values of other ranks.

        Args:
            optimizer: One of the trainer's optimizers.
            by_name: Whether to return this rank's part only, by the names of the parameters.
        """
        if not self.is_split:
            return self._unsplit_optimizer_state(optimizer, by_name)
        names = self._parameters.names_in(optimizer)
        mine = self._named_state(optimizer, in_shards=by_name)
        if by_name:
            return self._local_optimizer_state(optimizer, names, mine)
        is_shared_out = self._parameters.partition_of(optimizer) is not None
        ranks = self._group.world if is_shared_out else self._group
        return plain_state_dict(optimizer, names, self._gather_entries(mine, ranks))

    def _unsplit_optimizer_state(self, optimizer: Optimizer, by_name: bool) -> dict[str, Any]:
        """Return the state on global rank 0, which is that of all before the module is split."""
        if self._group.global_rank:
            return {}
        state = optimizer.state_dict()
        if not by_name:
            return state
        return name_optimizer_state(state, self._parameters.names_in(optimizer))

    def _local_optimizer_state(
        self, optimizer: Optimizer, names: GroupNames, state: dict[str, Any]
    ) -> dict[str, Any]:
        part: dict[str, Any] = {}
        state = {name: entry for name, entry in state.items() if entry}  # SGD keeps empty ones
        anything = self._group.world.agree(bool(state), unanimous=False)
        if state or not anything:
            part["state"] = state
        if self._group.is_root:
            part["param_groups"] = replace_group_params(optimizer.param_groups, names)
        return part

    def _named_state(self, optimizer: Optimizer, in_shards: bool) -> dict[str, Any]:
        parameters = self._pipeline.tensors.canonical_parameters()
        name_of = {id(parameter): name for name, parameter in parameters.items()}
        return {
            name_of[id(p)]: join_optimizer_state(name_of[id(p)], p, state, self._group, in_shards)
            for p, state in optimizer.state.items()
        }

    def load_module(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load this rank's part of a whole state dict; ``strict`` compares all keys.

        Raises:
            RuntimeError: Keys or shapes do not fit, as in ``Module.load_state_dict``.
        """
        module, names = self._pipeline.module, self._pipeline.tensors.names
        missing, unexpected = set(names) - set(state), set(state) - set(names)
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"the checkpoint does not fit {type(module).__name__}: missing {sorted(missing)}, "
                f"unexpected {sorted(unexpected)}"
            )
        load_4bit_weights(module, state, is_split=True)
        keys = self._own_keys()
        part = {key: value for key, value in state.items() if key in keys}
        module.load_state_dict(state_dict_of(part, like=state), strict=False)

    def _own_keys(self) -> set[str]:
        state = self._pipeline.module.state_dict(keep_vars=True)
        return {key for key, value in state.items() if not isinstance(value, ShapeOnly)}

    def load_optimizers(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load this rank's part of the plain optimizers' states.

        Before the module is split they stay unread: the part is read at the first batch.

        Raises:
            ValueError: The states belong to other groups.
        """
        if self._group.num_tensor_ranks > 1:
            of_all = zip(states, self._parameters.names, strict=True)
            states = [shard_optimizer_state(s, names, self._pipeline.module) for s, names in of_all]
        if not self.is_split:
            for (optimizer, names), state in zip(
                self._parameters.optimizers_with_names(), states, strict=True
            ):
                with self._parameters.loading_stand_in_state(optimizer):
                    optimizer.load_state_dict(number_optimizer_state(state, names))
            return
        parameters = self._pipeline.tensors.canonical_parameters()
        for (optimizer, names), state in zip(
            self._parameters.optimizers_with_names(), states, strict=True
        ):
            shares = self._parameters.partition_of(optimizer)
            with self._parameters.loading_stand_in_state(optimizer):
                load_optimizer_state(optimizer, state, names, parameters, shares)

    def read_stored_optimizer_states(self) -> None:
        """Read this rank's states that are still in a file; move all to the parameters' devices."""
        for optimizer, _ in self._parameters.optimizers_with_names():
            read_stored_states(optimizer)
            if self._pipeline.device.type != "cpu" and optimizer.state:
                with self._parameters.loading_stand_in_state(optimizer):
                    move_state_to_parameters(optimizer)


def broadcast_split_values(module: nn.Module, group: PipelineGroup) -> None:
    """Send the values of a module that an earlier pipeline left on single ranks to all ranks.

    All ranks call it.

    Raises:
        RuntimeError: No rank has a tensor of the module.
    """
    absent = {slot.name: slot for slot in find_remote_slots(module)}
    absent_on = group.gather(list(absent))
    missing = [name for name in absent if all(name in names for names in absent_on)]
    if missing:
        raise RuntimeError(format_absent_error(module))
    real_tensors: dict[int, Tensor] = {}
    present = {slot.name: slot.tensor for slot in find_slots(module)}
    for name in sorted({name for names in absent_on for name in names}):
        of_ranks = zip(group.global_ranks, absent_on, strict=True)
        source = min(rank for rank, names in of_ranks if name not in names)
        tensor = materialize_slot(absent[name], real_tensors) if name in absent else present[name]
        with reporting_lost_peers("lost a rank while bringing the module together"):
            value = group.broadcast_to_hosts(tensor, source)
        tensor.detach().copy_(value)
        if name in absent:
            copy_quant_state(absent[name], value)
    remove_complete_hooks(module)
