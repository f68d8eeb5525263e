"""A stand-in for an accelerator's graphs, on the CPU."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class Tape(TorchDispatchMode):
    """Replays operations on the tensors of their capture.

    Other than a graph it computes while it captures. What a graph's pool would use again after a
    replay is filled with NaN.
    """

    num_replays = 0

    def __init__(self):
        super().__init__()
        self._aliases = {}  # the tape's own tensors, by the memory that its operations have made

    def capture(self, run):
        self._calls = calls = []
        with self:
            run()
        dead = [memory for memory in self._aliases if self._is_dead(memory)]
        tensors = [self._aliases.pop(memory)[0] for memory in dead]

        @torch.no_grad()
        def replay():
            for func, args, kwargs, made in calls:
                for own, new in zip(made, _made(func(*args, **kwargs), args, kwargs), strict=True):
                    own.copy_(new)
            for tensor in tensors:
                tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
            Tape.num_replays += 1

        return replay

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a value is read during a capture")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = _made(result, args, kwargs)
        self._aliases |= {_memory(tensor): [] for tensor in made}
        own = tree_map(self._alias, (args, kwargs))
        self._calls.append((func, *own, [self._alias(tensor) for tensor in made]))
        return result

    def _alias(self, leaf):
        if not isinstance(leaf, Tensor):
            return leaf
        alias = leaf.detach()
        self._aliases.get(_memory(leaf), []).append(alias)
        return alias

    def _is_dead(self, memory):
        # Private: nothing public tells how many tensors share memory.
        return torch._C._storage_Use_Count(memory) == len(self._aliases[memory])


def _made(result, args, kwargs):
    """Return the tensors of a result that are no views of arguments, nor these themselves."""
    given = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
    found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return [tensor for tensor in found if _memory(tensor) not in given]


def _memory(tensor):
    return tensor.untyped_storage()._cdata
