"""DTensors in a compiled region, which takes and returns their local tensors instead.

A compiler resolves what a DTensor does, collectives included, while it traces. With DTensors at a
region's border each run would unwrap and wrap them, and W would dispatch on them, which takes
longer than small products. So the region makes DTensors of its local inputs itself::

    before   y = linear(x, weight)               weight: a DTensor
    after    y = linear(x, dtensor(weight))      weight: its local tensor

The gradient of a parameter is then that of :func:`local_of` it, and of a replicated one a part of a
sum over the ranks of its mesh: the backward of a region does not wait for a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor, Partial, Placement

_LOCAL = "_pipeoffload_local"


def local_of(value: Any) -> Any:
    """Return the local tensor of a DTensor; of a parameter, the one that has its gradient."""
    if not isinstance(value, DTensor):
        return value
    if not isinstance(value, nn.Parameter):
        return value._local_tensor  # private: to_local() is recorded by autograd
    local = getattr(value, _LOCAL, None)
    if local is None:
        local = nn.Parameter(value._local_tensor, value.requires_grad)
        setattr(value, _LOCAL, local)
    return local


def have_local_parts(inputs: Sequence[Any]) -> bool:
    """Return whether a region can take local tensors: none would lose its autograd history."""
    shards = [value for value in inputs if isinstance(value, DTensor)]
    return all(isinstance(each, nn.Parameter) or not each.requires_grad for each in shards)


def take_local_inputs(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Have a graph take local tensors; return the nodes that are DTensors of its inputs."""
    placeholders = graph.find_nodes(op="placeholder")
    input_of: dict[fx.Node, fx.Node] = {}
    for node in placeholders:
        example = node.meta.get("example_value")
        if isinstance(example, DTensor):
            with graph.inserting_after(placeholders[-1]):
                dtensor = graph.call_function(dtensor_like(example, adds_parts=True))
            node.replace_all_uses_with(dtensor)
            dtensor.args = (node,)
            dtensor.meta["example_value"] = example
            node.meta["example_value"] = local_of(example)
            input_of[dtensor] = node
    return input_of


def dtensor_like(example: DTensor, adds_parts: bool = False) -> Callable[[Tensor], DTensor]:
    """Return a function that makes a DTensor, placed as ``example``, of a local tensor.

    ``adds_parts``: the gradient of a replicated one is a part of a sum, else the sum.
    """
    # A compiler's graph cannot have meshes and placements as arguments.
    mesh, placements = example.device_mesh, example.placements
    shape, stride = example.shape, example.stride()
    gradients = gradient_placements(example) if adds_parts else None

    def dtensor(local: Tensor) -> DTensor:
        return DTensor.from_local(
            local, mesh, placements, shape=shape, stride=stride, grad_placements=gradients
        )

    return dtensor


def gradient_placements(parameter: DTensor) -> list[Placement]:
    """Return how the gradient of a parameter is placed that is that of :func:`local_of` it."""
    return [Partial() if each.is_replicate() else each for each in parameter.placements]


def to_local(tensor: DTensor) -> Tensor:
    """Return the local tensor, in autograd's graph."""
    return tensor.to_local()


def is_linear_of_locals(x: Any, weight: Any, result: Any) -> bool:
    """Return whether a linear layer's weight gradient is the product of local tensors.

    x is ``[..., in]``, weight ``[out, in]``, the result and its gradient ``[..., out]``; a result
    that is a part of a sum has a whole gradient.
    """
    if not all(isinstance(each, DTensor) for each in (x, weight, result)):
        return False
    last = x.dim() - 1

    def multiplies(x: Placement, weight: Placement, result: Placement) -> bool:
        if weight.is_shard(0):
            return x.is_replicate() and result.is_shard(last)
        if weight.is_shard(1):
            return x.is_shard(last) and (result.is_partial() or result.is_replicate())
        shares_rows = any(x.is_shard(dim) and result.is_shard(dim) for dim in range(last))
        return weight.is_replicate() and shares_rows

    return all(map(multiplies, x.placements, weight.placements, result.placements))
