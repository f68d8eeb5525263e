"""A module that was constructed in parts, until the first batch shows which stages use a weight.

A weight that the step uses on another stage than its layer's, as a tied head does, is sent to that
stage then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime.cut import SplitModule, materialize_slot
from lightning_pipeoffload.runtime.making.construction import Blueprint
from lightning_pipeoffload.runtime.making.registered_parameters import begins_with_nan
from lightning_pipeoffload.runtime.shapes import ShapeOnly, copy_quant_state, scales_of
from lightning_pipeoffload.runtime.users_code import Slot, find_slots

Fetch = Callable[[Tensor, int | None], Tensor]


class PartedModule:
    """A module whose parameters each rank has constructed for its own stages only.

    Args:
        module: The user's module.
        blueprint: The blueprint of its construction.
        stage_ranks: The rank of each stage.
        rank: This rank.
        fetch: Returns the tensor of a given rank of the pipeline; all ranks call it.

    Attributes:
        counts: The number of blocks of each stage.
        owners: The stages that own each parameter and buffer, by name.
        moved: For each parameter that was sent to other ranks, the rank that sent it, by name.
    """

    def __init__(
        self,
        module: nn.Module,
        blueprint: Blueprint,
        stage_ranks: Sequence[int],
        rank: int,
        fetch: Fetch,
    ) -> None:
        self._module = module
        self._stage_ranks = stage_ranks
        self._rank = rank
        self._fetch = fetch
        everywhere = frozenset(range(len(stage_ranks)))  # what a hook has added since
        owners = blueprint.owners
        self.owners = {slot.name: owners.get(slot.name, everywhere) for slot in find_slots(module)}
        self.counts = blueprint.counts
        self._is_filled = False
        self._ranks: dict[str, set[int]] = {}
        self.moved: dict[str, int] = {}

    def check_filled(self) -> None:
        """Raise ``RuntimeError`` if a parameter of this rank was never filled; checks only once."""
        if self._is_filled:
            return
        parameters = (slot for slot in find_slots(self._module) if slot.kind == "_parameters")
        left = [s.name for s in parameters if _is_unfilled(s.tensor)]
        if left:
            raise RuntimeError(_explain_unfilled(left))
        self._is_filled = True

    @torch.no_grad()
    def send_to_new_owners(
        self, owners: Mapping[str, frozenset[int]], tensors: SplitModule, slots: Sequence[Slot]
    ) -> None:
        """Send parameters to the ranks that need them; ``owners`` are their stages, by name."""
        by_name = {slot.name: slot for slot in slots}
        for names in tensors.parameter_names():
            have = self._ranks.setdefault(names[0], self._ranks_of(names, self.owners))
            missing = self._ranks_of(names, owners) - have
            if missing:
                source = self.moved[names[0]] = min(have)
                value = self._fetch(by_name[names[0]].tensor, source)
                have |= missing
                if self._rank in missing:
                    _make_slots_real([by_name[name] for name in names], value)

    def _ranks_of(self, names: Collection[str], owners: Mapping[str, frozenset[int]]) -> set[int]:
        return {self._stage_ranks[stage] for name in names for stage in owners[name]}


def _is_unfilled(tensor: Tensor) -> bool:
    """Return whether a parameter of this rank, or its quantized scales, is uninitialized."""
    tensors = () if isinstance(tensor, ShapeOnly) else (tensor, *scales_of(tensor))
    return any(begins_with_nan(each) for each in tensors)


def _explain_unfilled(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"nothing has filled {', '.join(names[:3])}{more} since configure_model made it: it has "
        f"whatever was in memory. Under init_module(empty_init=True) torch.nn.init does "
        f"nothing; load weights (load_weights in configure_model, or ckpt_path=), write values "
        f"yourself, or leave empty_init out"
    )


def _make_slots_real(slots: Sequence[Slot], value: Tensor) -> None:
    real_tensors: dict[int, Tensor] = {}
    for slot in slots:
        materialize_slot(slot, real_tensors).copy_(value)
        copy_quant_state(slot, value)
