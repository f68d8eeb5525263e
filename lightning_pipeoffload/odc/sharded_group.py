"""What FSDP2 shards together: the parameters of one module, and where their shards lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, eq=False)
class ShardedGroup:
    """Parameters that are gathered at once, and whose gradients are pushed at once.

    Attributes:
        name: The module's name, for messages.
        module: The module, on which FSDP2's hooks are set.
        members: FSDP2's own record of each parameter, in its order.
        names: Their names.
        sizes: The elements of each one's shard, padded to be the same on every rank.
        trained: The places of the parameters that are trained.
        published: What a shard is gathered as.
        summed: What gradients are added up in.
    """

    name: str
    module: FSDPModule
    members: tuple[Any, ...]
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    trained: tuple[int, ...]
    published: torch.dtype
    summed: torch.dtype

    @property
    def size(self) -> int:
        """Elements of a rank's shard."""
        return sum(self.sizes)

    @property
    def num_ranks(self) -> int:
        """How many ranks share the parameters."""
        first = self.parameters[0].data
        assert isinstance(first, DTensor)
        return first.device_mesh.size()

    @property
    def is_up_to_date(self) -> bool:
        """Whether the same parameters are trained as when this was noted."""
        return self.trained == _trained(self.members)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters, as this rank's shards."""
        return [member.sharded_param for member in self.members]

    @property
    def trained_size(self) -> int:
        """Elements of a rank's shard of what is trained."""
        return sum(self.sizes[place] for place in self.trained)

    def starts(self, places: Sequence[int]) -> list[int]:
        """Where the shard of each of some parameters begins, if these lie one after the other."""
        return [0, *accumulate(self.sizes[place] for place in places)][: len(places)]

    def local_shards(self) -> Iterator[tuple[int, Tensor]]:
        """Yield where each parameter's shard begins, and this rank's, flat and without padding."""
        starts = self.starts(range(len(self.sizes)))
        for start, parameter in zip(starts, self.parameters, strict=True):
            yield start, local_part(parameter.detach()).reshape(-1)


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank has of a sharded tensor."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def sharded_groups(root: nn.Module) -> list[ShardedGroup]:
    """List what is sharded in a module.

    Raises:
        ValueError: There is a parameter that is not sharded, or one that cannot be communicated on
            demand.
    """
    groups = [
        _group(name, module)
        for name, module in root.named_modules()
        if isinstance(module, FSDPModule) and _members(module)
    ]
    held = {id(parameter) for group in groups for parameter in group.parameters}
    for name, parameter in root.named_parameters():
        if id(parameter) not in held:
            raise ValueError(
                f"{name} is not sharded, so its gradients would stay what each rank makes of them; "
                f"let configure_model call fully_shard(self, ...) too, around what it shards"
            )
    return groups


def _members(module: FSDPModule) -> tuple[Any, ...]:
    # Private: which parameters FSDP2 communicates together, in which order and how padded.
    group = module._get_fsdp_state()._fsdp_param_group
    return () if group is None else tuple(group.fsdp_params)


def _group(name: str, module: Any) -> ShardedGroup:
    members = _members(module)
    policy = module._get_fsdp_state()._fsdp_param_group.mp_policy
    places = ((member._module_info, member) for member in members)
    names = tuple(f"{_path(module, info.module, name)}{info.param_name}" for info, member in places)
    types = {member.sharded_param.dtype for member in members}
    if len(types) > 1:
        raise ValueError(
            f"{name or 'the module'} has parameters of {_listed(types)}, which are gathered "
            f"together; give them one dtype, or shard those of another by themselves"
        )
    published = policy.param_dtype or next(iter(types))
    return ShardedGroup(
        name or "the module's own parameters",
        module,
        members,
        names,
        tuple(member.padded_sharded_param_size.numel() for member in members),
        _trained(members),
        published,
        policy.reduce_dtype or published,
    )


def _trained(members: Sequence[Any]) -> tuple[int, ...]:
    return tuple(i for i, m in enumerate(members) if m.sharded_param.requires_grad)


def _path(root: nn.Module, module: nn.Module, prefix: str) -> str:
    inner = next(name for name, found in root.named_modules() if found is module)
    return "".join(f"{part}." for part in (prefix, inner) if part)


def _listed(types: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(kind).removeprefix("torch.") for kind in types))
