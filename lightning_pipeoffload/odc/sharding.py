"""Shards a module by FSDP2: what is communicated together, how optimizers step, and their state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer, Rprop, SparseAdam
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map  # private: torch exports no other
from typing_extensions import override

from lightning_pipeoffload.runtime.comm import HostGroup, reporting_lost_peers
from lightning_pipeoffload.runtime.cut import find_chain
from lightning_pipeoffload.runtime.shapes import local_part

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP2 has sharded any submodule."""
    return any(isinstance(part, FSDPModule) for part in module.modules())


def shard(
    module: nn.Module,
    blocks: str | Sequence[str] | None,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
) -> None:
    """Shard a module in place; its steps gather the parameters that they use.

    Args:
        module: The user's module.
        blocks: The blocks that are gathered one by one: the name of a container, or patterns; None:
            found.
        mesh: The ranks that share the parameters.
        policy: Mixed precision.

    Raises:
        ValueError: There are no such blocks.
    """
    for block in _blocks_of(module, blocks):
        fully_shard(block, mesh=mesh, mp_policy=_set_reduce_dtype(policy, block))
    fully_shard(module, mesh=mesh, mp_policy=_set_reduce_dtype(policy, module))
    for step in _STEPS:
        if hasattr(module, step):
            register_fsdp_forward_method(module, step)


def share_initial_values(module: nn.Module, host: HostGroup) -> None:
    """Broadcast global rank 0's values of a module that is not sharded yet.

    Without a seed, ranks have different values. Accelerator tensors use the default group.
    """
    tensors = {id(t): t.detach() for t in (*module.parameters(), *module.buffers())}
    with reporting_lost_peers("lost a rank while sharing the initial weights"):
        for tensor in tensors.values():
            if not tensor.is_meta:
                group = host.host_group if tensor.device.type == "cpu" else None
                dist.broadcast(tensor, 0, group=group)


def _blocks_of(module: nn.Module, blocks: str | Sequence[str] | None) -> list[nn.Module]:
    """Return the blocks that have parameters and share none with other modules."""
    if blocks is None and not _has_containers(module):
        return []
    owners: dict[Tensor, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, set()).add(name)
    chain = find_chain(module, blocks)
    separate = []
    for index, block in enumerate(chain.blocks):
        prefix = f"{chain.block_name(index)}."
        names = [owners[parameter] for parameter in block.parameters()]
        if names and all(name.startswith(prefix) for shared in names for name in shared):
            separate.append(block)
    return separate


def _has_containers(module: nn.Module) -> bool:
    return any(
        isinstance(part, nn.ModuleList | nn.Sequential)
        and sum(any(True for _ in entry.parameters()) for entry in part.children()) > 1
        for part in module.modules()
        if part is not module
    )


def _set_reduce_dtype(policy: MixedPrecisionPolicy, module: nn.Module) -> MixedPrecisionPolicy:
    """Set the dtype of gradient sums explicitly: None means different things in torch versions."""
    dtype = next((parameter.dtype for parameter in module.parameters()), None)
    return replace(policy, reduce_dtype=policy.reduce_dtype or policy.param_dtype or dtype)


@dataclass(frozen=True, eq=False)
class ShardedGroup:
    """Parameters that FSDP2 gathers together, and whose gradients are pushed together.

    Attributes:
        name: The module's name, for messages.
        module: The module.
        members: FSDP2's record of each parameter, in FSDP2's order.
        names: The parameters' names.
        sizes: The elements of each parameter's shard, padded to be the same on every rank.
        trained: The indices of the parameters that are trained.
        published: The dtype in which a shard is gathered.
        summed: The dtype in which gradients are summed.
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
        """The number of ranks that share the parameters."""
        first = self.parameters[0].data
        assert isinstance(first, DTensor)
        return first.device_mesh.size()

    @property
    def is_up_to_date(self) -> bool:
        """Whether ``trained`` is up to date."""
        return self.trained == _trained(self.members)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters, as this rank's shards."""
        return [member.sharded_param for member in self.members]

    @property
    def trained_size(self) -> int:
        """Elements of a rank's shard of the trained parameters."""
        return sum(self.sizes[place] for place in self.trained)

    def starts(self, places: Sequence[int]) -> list[int]:
        """Return the offsets of some parameters' shards in their concatenation."""
        return [0, *accumulate(self.sizes[place] for place in places)][: len(places)]

    def local_shards(self) -> Iterator[tuple[int, Tensor]]:
        """Yield each shard's offset, and this rank's shard, flat and without padding."""
        starts = self.starts(range(len(self.sizes)))
        for start, parameter in zip(starts, self.parameters, strict=True):
            yield start, local_part(parameter.detach()).reshape(-1)


def sharded_groups(root: nn.Module) -> list[ShardedGroup]:
    """List the sharded groups of a module.

    Raises:
        ValueError: A parameter is not sharded, or cannot be communicated on demand.
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
    # Private: FSDP2's group of parameters, with its order and padding.
    group = module._get_fsdp_state()._fsdp_param_group
    return () if group is None else tuple(group.fsdp_params)


def _group(name: str, module: Any) -> ShardedGroup:
    members = _members(module)
    places = ((member._module_info, member) for member in members)
    names = tuple(f"{_path(module, info.module, name)}{info.param_name}" for info, member in places)
    policy = members[0].mp_policy
    held = {member.sharded_param.dtype for member in members}
    gathered = {member.mp_policy.param_dtype or member.sharded_param.dtype for member in members}
    if len(types := max(held, gathered, key=len)) > 1:
        raise ValueError(
            f"{name or 'the module'} has parameters of {_listed(types)}, which are gathered "
            f"together; give them one dtype, or shard those of another by themselves"
        )
    published = next(iter(gathered))
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
    inner = next(name for name, child in root.named_modules() if child is module)
    return "".join(f"{part}." for part in (prefix, inner) if part)


def _listed(types: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(kind).removeprefix("torch.") for kind in types))


_REFUSED = {
    Rprop: "it writes into those elements of a gradient that it chooses, which shards cannot",
    SparseAdam: "it takes sparse gradients only, which FSDP2 does not shard",
}


def refuse_optimizers(optimizers: Sequence[Any]) -> None:
    """Refuse optimizers that torch cannot step with shards."""
    for kind, reason in _REFUSED.items():
        if any(isinstance(optimizer, kind) for optimizer in optimizers):
            raise ValueError(
                f"{kind.__name__} does not go with strategy='odc': {reason}; use another "
                f"optimizer, such as AdamW"
            )


@contextmanager
def matching_unsharded_steps(optimizer: Optimizer) -> Iterator[None]:
    """Make an optimizer's steps inside return the same results as on one device.

    Most optimizers are elementwise, for which shards suffice; some need whole matrices.
    """
    with ExitStack() as modes:

        def enter(_: Optimizer, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if kwargs.get("closure") is None:
                modes.enter_context(_ReplicatingMode())
                return args, kwargs
            return args, {**kwargs, "closure": _run_without_modes(modes, kwargs["closure"])}

        after = optimizer.register_step_post_hook(lambda *_: modes.close())
        with optimizer.register_step_pre_hook(enter), after:
            yield


def _run_without_modes(modes: ExitStack, closure: Callable[[], Any]) -> Callable[[], Any]:
    """Return a closure that runs without the modes, which are for the optimizer only."""

    def call() -> Any:
        modes.close()
        result = closure()
        modes.enter_context(_ReplicatingMode())
        return result

    return call


class _ReplicatingMode(TorchFunctionMode):
    """Replicates results that are pending sums over ranks, or are rounded before a product.

    Adafactor squares norms in place, which is not possible for pending sums. Muon multiplies in
    bfloat16, in which the sum of the ranks' products differs from the product of whole matrices.
    """

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, DTensor) and (_is_partial(result) or _is_rounded(func, result)):
            return result.redistribute(placements=[Replicate()] * result.device_mesh.ndim)
        return result


def _is_partial(tensor: DTensor) -> bool:
    return any(placement.is_partial() for placement in tensor.placements)


def _is_rounded(func: Callable[..., Any], result: DTensor) -> bool:
    return func in (Tensor.bfloat16, Tensor.to) and result.dtype == torch.bfloat16


def gather_full_state(optimizer: Optimizer, keep: bool) -> dict[str, Any]:
    """Gather the state of an optimizer of shards on the host; all ranks call it.

    Parameters are numbered as in the optimizer, so that this and other strategies can read each
    other's states.

    Args:
        optimizer: An optimizer of sharded parameters.
        keep: Whether to return the state on this rank; otherwise the result is empty.
    """
    state = tree_map(partial(_gathered, keep=keep), optimizer.state_dict())
    return state if keep else {}


def load_full_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load this rank's shards of a whole state into an optimizer of sharded parameters."""
    parameters = chain(*(group["params"] for group in optimizer.param_groups))
    numbers = chain(*(group["params"] for group in state["param_groups"]))
    owners = dict(zip(numbers, parameters, strict=False))  # load_state_dict says where they differ
    shards = {
        number: tree_map(partial(_shard_like, owners.get(number)), values)
        for number, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": shards})


def _gathered(value: Any, keep: bool) -> Any:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    if not keep:
        return None
    return whole.cpu() if isinstance(whole, Tensor) else whole


def _shard_like(parameter: nn.Parameter | None, value: Any) -> Any:
    """Return this rank's shard of a tensor with the parameter's shape; others unchanged."""
    sharded = None if parameter is None else parameter.data
    if not isinstance(value, Tensor) or not value.ndim or not isinstance(sharded, DTensor):
        return value
    placements = sharded.placements
    if value.shape != sharded.shape:
        placements = (Replicate(),) * sharded.device_mesh.ndim
    # Without a source nothing is sent: each rank has read the whole tensor.
    return distribute_tensor(value, sharded.device_mesh, placements, src_data_rank=None)
