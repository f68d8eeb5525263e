"""The user's module split over ranks: each rank has the parameters and buffers of its own stages.

Names never change. A tensor that no stage of this rank owns is replaced by a shape-only tensor
under the same name, so that the module has all its names. While a stage runs, tensors that only
other stages of the rank own are shape-only too: the dicts of parameters and buffers are swapped, in
the few modules outside of the blocks. A tied weight is one parameter with several names, possibly
on several stages; its first name identifies it.

Contents of a slot (the place of a parameter or buffer in its module), by the method called last::

                   this stage's   the rank's other stages'   other ranks'
    assign         value          value                      value
    drop_remote    value          value                      shape, from now on
    hide, in F     shape          shape                      shape; values of buffers that all have
    show, in F     value          shape                      shape
    restore        value          value                      shape
    make_loadable  value          value                      shape, until a state dict is loaded
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.cut.remote_values import RemoteTensorHooks
from lightning_pipeoffload.runtime.shapes import (
    Awaited,
    GradientChanges,
    RemoteTensor,
    ShapeOnly,
    move_weight,
    sync_layer_quant_state,
)
from lightning_pipeoffload.runtime.users_code import Slot, find_slots

_View = list[tuple[dict[str, Any], str, dict[str, Any]]]


class _Hidden(Awaited, RemoteTensor):
    """A shape in place of a tensor outside of the blocks, while a stage runs.

    A tensor of that stage is hidden until its first block runs, others during the whole step.
    """


class SharedWeight(NamedTuple):
    """A parameter, all its names, and the stages that use it."""

    parameter: Tensor
    names: tuple[str, ...]
    stages: tuple[int, ...]


class SplitModule:
    """The parameters and buffers of the module: which stages own each, and where values are.

    Args:
        module: The user's module.
        chain: Its blocks.
        stage_ranks: The rank of each stage.
        rank: This rank.
        device: The device of this rank.

    Attributes:
        slots: The slots of all parameters and buffers.
        parameters: The parameters, each once.
        names: The keys of the module's state dict.
        identity: A number for each parameter and buffer, by name; the same for tied weights.
        trainable: Names of the parameters.
        stage_ranks: The rank of each stage.
        local_stages: The stages of this rank.
        owners: The stages that own each parameter and buffer, by name, once it is cut.
        shared_weights: This rank's parameters that more than one stage of the pipeline uses.
        is_split: Whether tensors of other ranks are shapes.
    """

    def __init__(
        self,
        module: nn.Module,
        chain: BlockChain,
        stage_ranks: Sequence[int],
        rank: int,
        device: torch.device,
    ) -> None:
        self._module, self._chain = module, chain
        self.stage_ranks, self._device = stage_ranks, device
        self.local_stages = [s for s, of_stage in enumerate(stage_ranks) if of_stage == rank]
        self._local = frozenset(self.local_stages)
        self.slots = slots = find_slots(module)
        self.parameters = list(module.parameters())
        state = module.state_dict(keep_vars=True)
        self.names = list(state)
        by_id = {id(slot.tensor): slot.name for slot in reversed(slots)}
        self.identity = {slot.name: id(slot.tensor) for slot in slots}
        self._names_of: dict[int, list[str]] = {}
        for name, identity in self.identity.items():
            self._names_of.setdefault(identity, []).append(name)
        self.trainable = {slot.name for slot in slots if slot.kind == "_parameters"}
        self._slot_of = {
            key: key if key in self.identity else by_id.get(id(tensor))
            for key, tensor in state.items()
        }
        self.owners: Mapping[str, frozenset[int]] = {}
        self.shared_weights: list[SharedWeight] = []
        self.is_split = False
        self._unsaved: dict[str, Tensor] = {}
        self._absent: RemoteTensorHooks | None = None

    def assign(self, owners: Mapping[str, frozenset[int]], slots: list[Slot]) -> None:
        """Set the stages that own each parameter and buffer; again when a step uses more."""
        self.owners, self.slots = owners, slots
        self.parameters = list(self._module.parameters())
        self._stand_ins: list[tuple[RemoteTensor, Slot]] = []
        everyone = frozenset().union(*owners.values())
        self._common = {name for name, stages in owners.items() if stages == everyone}
        glue = [slot for slot in slots if self._chain.enclosing_block(slot.name) is None]
        with_hidden = {id(slot.module) for slot in glue if not self._is_common_buffer(slot)}
        glue = [slot for slot in glue if id(slot.module) in with_hidden]
        self._blocks: dict[tuple[str, ...], tuple[_View, _View]] = {}
        self._home = self._make_view(glue, lambda slot: True)
        self._hidden = self._make_view(glue, self._is_common_buffer)
        hidden = [(p, slot) for p, slot in self._stand_ins if isinstance(p, _Hidden)]
        self._fetched = {
            stage: [(p, slot) for p, slot in hidden if stage in owners[slot.name]]
            for stage in self.local_stages
        }
        self._shown: list[tuple[_Hidden, Slot]] = []
        self._views = {stage: self._view_of(stage, glue) for stage in self.local_stages}
        self.shared_weights = self._find_shared_weights()
        self.restore()  # what is put into a slot from now on is in this view

    # In a step

    def show(self, stage: int) -> None:
        """Give modules outside of the blocks the weights and buffers of ``stage``, else shapes."""
        _exchange(self._views[stage])
        # A weight that the step has read before the stage's first block gets its value now.
        self._shown = self._fetched[stage]
        for placeholder, slot in self._shown:
            placeholder.value = slot.tensor

    def hide(self) -> None:
        """Replace tensors of modules outside of the blocks by shapes.

        Buffers that every stage owns stay.
        """
        _exchange(self._hidden)
        for placeholder, _ in self._shown:
            placeholder.value = None

    def restore(self) -> None:
        """Put all tensors that this rank owns into their modules."""
        _exchange(self._home)

    @contextmanager
    def hiding(self, *blocks: str) -> Iterator[None]:
        """Replace all parameters and buffers of the named blocks by shapes within the context.

        Those that this rank owns are put back at the exit.
        """
        if blocks not in self._blocks:
            paths = tuple(f"{block}." for block in blocks)
            slots = [slot for slot in self.slots if slot.name.startswith(paths)]
            home = self._make_view(slots, lambda slot: True)
            self._blocks[blocks] = home, self._make_view(slots, lambda slot: False)
        home, hidden = self._blocks[blocks]
        _exchange(hidden)
        try:
            yield
        finally:
            _exchange(home)

    # What this rank has

    @property
    def has_same_layers(self) -> bool:
        """Whether the module has the same layers still: none was replaced, added or removed."""
        return _layers_of(find_slots(self._module)) == _layers_of(self.slots)

    def is_local(self, name: str) -> bool:
        """Whether a stage of this rank owns ``name``."""
        return bool(self.owners[name] & self._local)

    def local_tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers that this rank owns, by name."""
        return {slot.name: slot.tensor for slot in self.slots if self.is_local(slot.name)}

    def move(self) -> None:
        """Move the tensors of this rank to its device; shapes report that device from now on."""
        for slot in self.slots:
            if self.is_local(slot.name) or isinstance(slot.tensor, RemoteTensor):
                move_weight(slot, self._device)

    def drop_remote(self, changes: GradientChanges, global_ranks: Sequence[int]) -> None:
        """Replace the tensors of other ranks with shapes; a tied weight under all its names.

        Args:
            changes: Counts the changes of gradients; the shapes' ``grad`` depends on it.
            global_ranks: The global rank of each stage, for error messages.
        """
        self.is_split = True
        self._unsaved |= {slot.name: slot.tensor for slot in self.slots if self._is_lost(slot)}
        shown = {id(slot.tensor): slot.tensor for slot in self.slots if self.is_local(slot.name)}
        for slot in [slot for slot in self.slots if not self.is_local(slot.name)]:
            value = shown.setdefault(id(slot.tensor), self._placeholder(slot, global_ranks))
            slot.put(value)
            if isinstance(value, RemoteTensor):
                sync_layer_quant_state(slot)
                value.share_changes(changes)
        self.assign(self.owners, self.slots)

    def _is_lost(self, slot: Slot) -> bool:
        # Private: the non-persistent buffers, which loading a state dict does not restore.
        is_unsaved = slot.attribute in slot.module._non_persistent_buffers_set
        return is_unsaved and not self.is_local(slot.name)

    def make_loadable(self) -> None:
        """Make the module loadable again, once the pipeline has ended.

        A forward raises an error until ``load_state_dict`` has replaced the shape-only tensors of
        other ranks with real ones.
        """
        if self.is_split and self._absent is None:
            self._absent = RemoteTensorHooks(self._module, self._unsaved)

    def restore_shapes(self) -> None:
        """Undo :meth:`make_loadable`: a pipeline uses the module again, with shape-only tensors."""
        if self._absent is not None:
            self._absent.restore_shapes()
            self._absent = None

    def follow_requires_grad(self) -> None:
        """Copy ``requires_grad`` from this rank's tensors to the shapes that hide them."""
        for placeholder, slot in self._stand_ins:
            placeholder.requires_grad_(slot.tensor.requires_grad)

    # Names and owners

    def refuse_added(self, slots: Iterable[Slot]) -> None:
        """Raise ``ValueError`` if a hook has added a parameter to the module since."""
        parameters = [slot.name for slot in slots if slot.kind == "_parameters"]
        added = [name for name in parameters if name not in self.identity]
        if added:
            more = f" and {len(added) - 1} more" if len(added) > 1 else ""
            raise ValueError(
                f"the module got {added[0]}{more} after its parameters had been assigned to ranks: "
                f"make it in __init__ or configure_model; keep a copy that averages weights "
                f"outside of the module tree, in a callback or a list "
                f"(self.averages = [copy.deepcopy(self)])"
            )

    def shared_parameters(self) -> list[tuple[str, Tensor, tuple[int, ...]]]:
        """List (name, parameter, ranks) of this rank's parameters that other ranks own too.

        In the same order on every rank.
        """
        local = sorted(self.canonical_parameters().items())
        entries = [(name, tensor, self._ranks_of(name)) for name, tensor in local]
        return [entry for entry in entries if len(entry[2]) > 1]

    def names_on_several_ranks(self) -> list[str]:
        """List the first names of the parameters that several ranks own, equal on every rank."""
        names = [aliases[0] for aliases in self.parameter_names()]
        owned = [name for name in names if name in self.owners]
        return [name for name in owned if len(self._ranks_of(name)) > 1]

    def sharing_rank_sets(self) -> list[tuple[int, ...]]:
        """List every set of ranks that share a parameter, in the same order on every rank."""
        all_ranks = {self._ranks_of(name) for name in self.owners if name in self.trainable}
        return sorted(ranks for ranks in all_ranks if len(ranks) > 1)

    def common_buffers(self) -> list[Tensor]:
        """List the buffers that every stage has, in the same order on every rank."""
        return [
            tensor
            for name, tensor in self.local_tensors().items()
            if name not in self.trainable and self.is_on_every_stage(name)
        ]

    def owner_of(self, key: str) -> int | None:
        """Return the rank that saves an entry of the state dict: the rank of its last stage.

        None for an entry of ``get_extra_state`` or a hook, which is no parameter or buffer.
        """
        slot = self._slot_of.get(key)
        return None if slot is None else self._owner_of_slot(slot)

    def canonical_parameters(self) -> dict[str, Tensor]:
        """Return this rank's parameters by their first name in the whole module."""
        local = self.local_tensors().items()
        parameters = {self.aliases(name)[0]: tensor for name, tensor in local}
        return {name: t for name, t in parameters.items() if isinstance(t, nn.Parameter)}

    def distinct(self) -> list[Tensor]:
        """List this rank's parameters and buffers, each once; in the same order on all replicas."""
        return list({id(t): t for t in self.local_tensors().values()}.values())

    def parameters_with_local_stages(self) -> dict[str, tuple[Tensor, frozenset[int]]]:
        """Return this rank's parameters by name, each with the local stages that use it."""
        return {
            name: (tensor, self.owning_stages(name) & self._local)
            for name, tensor in self.canonical_parameters().items()
        }

    def parameter_names(self) -> list[list[str]]:
        """List the names of each parameter, in the same order on every rank."""
        return [names for names in self._names_of.values() if names[0] in self.trainable]

    def _owner_of_slot(self, name: str) -> int:
        return self.stage_ranks[max(self.owners[name])]

    def rank_with_all(self, names: Iterable[str]) -> int | None:
        """Return a rank that has the values of several parameters and buffers; None: none has."""
        common = [frozenset(self.stage_ranks[s] for s in self.owners[name]) for name in names]
        return max(frozenset.intersection(*common), default=None) if common else None

    def is_on_every_stage(self, name: str) -> bool:
        """Whether every stage has a parameter or buffer."""
        return len(self.owners[name]) == len(self.stage_ranks)

    def owning_stages(self, name: str) -> frozenset[int]:
        """Return the stages that own a parameter or buffer, by any of its names."""
        return frozenset().union(*(self.owners[alias] for alias in self.aliases(name)))

    def _find_shared_weights(self) -> list[SharedWeight]:
        weights = (
            SharedWeight(tensor, tuple(self.aliases(name)), tuple(sorted(self.owning_stages(name))))
            for name, tensor in self.canonical_parameters().items()
        )
        return [weight for weight in weights if len(weight.stages) > 1]

    def aliases(self, name: str) -> list[str]:
        """List all names of a tensor in the order of the module."""
        return self._names_of[self.identity[name]]

    def _ranks_of(self, name: str) -> tuple[int, ...]:
        return tuple(sorted({self.stage_ranks[stage] for stage in self.owning_stages(name)}))

    def _is_common_buffer(self, slot: Slot) -> bool:
        return slot.kind == "_buffers" and slot.name in self._common

    def _view_of(self, stage: int, slots: Iterable[Slot]) -> _View:
        return self._make_view(slots, lambda slot: stage in self.owners[slot.name])

    def _make_view(self, slots: Iterable[Slot], is_visible: Callable[[Slot], bool]) -> _View:
        view: dict[tuple[int, str], tuple[dict[str, Any], str, dict[str, Any]]] = {}
        for slot in slots:
            place = slot.module.__dict__
            key = id(slot.module), slot.kind
            _, _, contents = view.setdefault(key, (place, slot.kind, dict(place[slot.kind])))
            if not is_visible(slot) and not isinstance(slot.tensor, RemoteTensor):
                contents[slot.attribute] = self._placeholder(slot)
                self._stand_ins.append((contents[slot.attribute], slot))
        return list(view.values())

    def _placeholder(self, slot: Slot, global_ranks: Sequence[int] = ()) -> RemoteTensor:
        stages = sorted(self.owners[slot.name])
        place = "of stage " + " and ".join(map(str, stages))
        if global_ranks:
            ranks = sorted({global_ranks[stage] for stage in stages})
            place += ", on global rank " + " and ".join(map(str, ranks))
        # The rank's device even while the module is on the host: steps make masks there.
        kind = RemoteTensor if global_ranks else _Hidden
        return kind.standing_for(slot, f"{slot.name} ({place})", self._device)


def _layers_of(slots: Iterable[Slot]) -> list[tuple[str, int]]:
    return [(slot.name, id(slot.module)) for slot in slots]


def _exchange(view: _View) -> None:
    for place, kind, contents in view:
        if kind == "_buffers":  # which a step may assign anew
            contents.update(_real_in_both(place[kind], contents))
        place[kind] = contents


def _real_in_both(present: dict[str, Any], contents: dict[str, Any]) -> dict[str, Any]:
    return {
        name: tensor
        for name, tensor in present.items()
        if not isinstance(tensor, ShapeOnly) and not isinstance(contents.get(name), ShapeOnly)
    }
