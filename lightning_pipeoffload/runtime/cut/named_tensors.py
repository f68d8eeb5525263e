"""The parameters and buffers of a module by name: which of them are one, and which ranks have them.

A tied weight is one parameter with several names, each on another stage, maybe; its first name
stands for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from lightning_pipeoffload.runtime.cut.ownership import Ownership
from lightning_pipeoffload.runtime.payload import TensorSpec
from lightning_pipeoffload.runtime.users_code.tensor_slots import find_slots


class SharedWeight(NamedTuple):
    """A parameter, all its names, and the stages that use it."""

    parameter: Tensor
    names: tuple[str, ...]
    stages: tuple[int, ...]


class NamedTensors:
    """What the whole module had, and what one rank has of it.

    Args:
        module: The user's module, which is whole.
        stage_ranks: The pipeline rank of each stage.

    Attributes:
        names: The names of the entries of the module's state dict.
        specs: Shape and dtype of those entries that are tensors.
        identity: A number for each parameter and buffer, by name; tied weights have the same.
        trainable: Names of the parameters.
        ownership: Which stages have what; it is there once the module is cut.
    """

    ownership: Ownership

    def __init__(self, module: nn.Module, stage_ranks: Sequence[int]) -> None:
        self._stage_ranks = stage_ranks
        state = module.state_dict(keep_vars=True)
        self.names = list(state)
        self.specs = {
            key: TensorSpec(t.shape, t.dtype, False)
            for key, t in state.items()
            if isinstance(t, Tensor)
        }
        slots = find_slots(module)
        by_id = {id(slot.tensor): slot.name for slot in reversed(slots)}
        self._order = {slot.name: place for place, slot in enumerate(slots)}
        self.identity = {slot.name: id(slot.tensor) for slot in slots}
        self.trainable = {slot.name for slot in slots if slot.kind == "_parameters"}
        self._slot_of = {
            key: key if key in self._order else by_id.get(id(tensor))
            for key, tensor in state.items()
        }

    def refuse_added(self, module: nn.Module) -> None:
        """Refuse parameters that a hook has added to the module since.

        Raises:
            ValueError: A hook has added one.
        """
        added = [name for name, _ in module.named_parameters() if name not in self._order]
        if added:
            more = f" and {len(added) - 1} more" if len(added) > 1 else ""
            raise ValueError(
                f"{added[0]}{more} came into the module after it was set up, when its parameters "
                f"had been shared out: make it in __init__ or configure_model, or keep a copy that "
                f"averages weights apart from the module's parts, in a callback or a list "
                f"(self.averages = [copy.deepcopy(self)])"
            )

    def shared_parameters(self) -> list[tuple[str, Tensor, tuple[int, ...]]]:
        """List (name, parameter, ranks) of this rank's parameters that other ranks own too.

        In the same order on every rank.
        """
        shared = {
            name: (name, tensor, self._ranks_of(name))
            for name, tensor in self.canonical_parameters().items()
        }
        return [entry for _, entry in sorted(shared.items()) if len(entry[2]) > 1]

    def ranks_sharing(self) -> list[tuple[int, ...]]:
        """List every set of ranks that share a parameter, in the same order on every rank."""
        found = {self._ranks_of(name) for name in self.ownership.owners if name in self.trainable}
        return sorted(ranks for ranks in found if len(ranks) > 1)

    def common_buffers(self) -> list[Tensor]:
        """List the buffers that every stage has, in the same order on every rank."""
        count = len(self._stage_ranks)
        return [
            tensor
            for name, tensor in self.ownership.local_tensors().items()
            if name not in self.trainable and len(self.ownership.owners[name]) == count
        ]

    def owner_of(self, key: str) -> int | None:
        """Return the rank that saves an entry of the state dict: the one with its last stage.

        None for what is no parameter or buffer: what ``get_extra_state`` or a hook has added.
        """
        slot = self._slot_of.get(key)
        return None if slot is None else self.owner_of_slot(slot)

    def canonical_parameters(self) -> dict[str, Tensor]:
        """Return this rank's parameters by their first name in the whole module."""
        parameters = {
            min(self.aliases(name), key=self._order.__getitem__): tensor
            for name, tensor in self.ownership.local_tensors().items()
        }
        return {name: t for name, t in parameters.items() if isinstance(t, nn.Parameter)}

    def own(self) -> list[Tensor]:
        """List this rank's parameters and buffers, each once; in one order on all replicas."""
        return list({id(t): t for t in self.ownership.local_tensors().values()}.values())

    def with_local_stages(self) -> dict[str, tuple[Tensor, frozenset[int]]]:
        """Return this rank's parameters by name, each with those of its stages that use it."""
        return {
            name: (tensor, self.owners_of(name) & self.ownership.local_stages)
            for name, tensor in self.canonical_parameters().items()
        }

    def parameter_names(self) -> list[list[str]]:
        """List the names of each parameter, in the same order on every rank."""
        found: dict[int, list[str]] = {}
        for name, identity in self.identity.items():
            if name in self.trainable:
                found.setdefault(identity, []).append(name)
        return list(found.values())

    def owner_of_slot(self, name: str) -> int:
        """Return the rank whose value of a parameter or buffer counts."""
        return self._stage_ranks[max(self.ownership.owners[name])]

    def is_everywhere(self, name: str) -> bool:
        """Whether every stage has a parameter or buffer."""
        return len(self.ownership.owners[name]) == len(self._stage_ranks)

    def owners_of(self, name: str) -> frozenset[int]:
        """Return the stages that own a parameter or buffer, under whatever name."""
        return frozenset().union(*(self.ownership.owners[alias] for alias in self.aliases(name)))

    def on_several_stages(self) -> list[SharedWeight]:
        """List this rank's parameters that more than one stage uses, of this rank or others."""
        found = (
            SharedWeight(tensor, tuple(self.aliases(name)), tuple(sorted(self.owners_of(name))))
            for name, tensor in self.canonical_parameters().items()
        )
        return [weight for weight in found if len(weight.stages) > 1]

    def aliases(self, name: str) -> list[str]:
        """List all names of a tensor."""
        return [other for other, i in self.identity.items() if i == self.identity[name]]

    def _ranks_of(self, name: str) -> tuple[int, ...]:
        return tuple(sorted({self._stage_ranks[stage] for stage in self.owners_of(name)}))
