"""Random numbers of modules: for a shard they differ between tensor ranks, else they are equal.

All tensor ranks begin a segment of a step with one seed. A trace finds which modules draw for
shards; each rank gives these a random stream of its own. A module inside of one may draw for a
value that all ranks have; it draws from a common stream::

    attention         draws for its heads      a stream of each rank
      out.dropout     draws for their sum      a common stream, inside of that
    dropout           draws for a shard        a stream of each rank

Every stream is seeded by what comes before it in the segment, so that masks depend on neither the
number of stages nor the schedule, and blocks that are recomputed draw them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any, NamedTuple

from torch import nn

from lightning_pipeoffload.runtime import draw_seed, mix_seed, seed_torch
from lightning_pipeoffload.runtime.shapes import has_observer


class _Stream(NamedTuple):
    seed: int
    is_of_shard: bool
    inner: list[int]  # as many as streams inside it so far


class ShardDraws:
    """The streams of random numbers of the modules that draw for shards.

    Args:
        tensor_rank: The rank of this process among those that share its layers.
    """

    def __init__(self, tensor_rank: int) -> None:
        self._tensor_rank = tensor_rank
        self._is_of_shard: dict[nn.Module, bool] = {}
        self._hooked: set[nn.Module] = set()
        self._streams: list[_Stream] = []

    def register_drawing_modules(
        self,
        drawing_modules: Mapping[nn.Module, bool],
        blocks: Iterable[nn.Module],
        is_compiled: Any,
    ) -> None:
        """Give streams to modules that draw random numbers.

        Args:
            drawing_modules: The modules that a trace has found; True: it draws for a shard.
            blocks: The blocks of the chain.
            is_compiled: The setting ``compile``, of which only the truth counts.

        Raises:
            ValueError: A module that draws for a shard contains a block or is one, is compiled, or
                draws for a whole value in another step.
        """
        for module, is_of_shard in drawing_modules.items():
            self._add(module, is_of_shard, {*blocks}, bool(is_compiled))
        of_shards = [module for module, is_of_shard in self._is_of_shard.items() if is_of_shard]
        inside = {inner for module in of_shards for inner in module.modules()}
        for module in (inside & self._is_of_shard.keys()) - self._hooked:
            self._hooked.add(module)
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave, always_call=True)

    def _add(
        self, module: nn.Module, is_of_shard: bool, blocks: Set[nn.Module], is_compiled: bool
    ) -> None:
        draws = f"{type(module).__name__} draws random numbers for a shard of a layer"
        if self._is_of_shard.setdefault(module, is_of_shard) != is_of_shard:
            raise ValueError(f"{draws} in one step, and not in another; use two modules")
        if is_of_shard and is_compiled:
            raise ValueError(
                f"{draws}, which is not supported with compile; leave that out, or set dropout to 0"
            )
        if is_of_shard and not blocks.isdisjoint(module.modules()):  # which have seeds of their own
            raise ValueError(
                f"{draws} itself, and it is a block or has blocks in it; have it call a module "
                f"that draws, such as torch.nn.Dropout, or set dropout to 0"
            )

    def _enter(self, module: nn.Module, args: Any) -> None:
        if has_observer():
            return
        outer = self._streams[-1] if self._streams else None
        if outer is not None and outer.is_of_shard:
            outer.inner.append(0)
            seed = mix_seed(outer.seed, len(outer.inner) + 1)
        else:
            seed = draw_seed()  # the same on all tensor ranks
        self._streams.append(_Stream(seed, self._is_of_shard[module], []))
        self._seed(seed, self._is_of_shard[module])

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        if has_observer() or not self._streams:
            return
        stream = self._streams.pop()
        is_in_shard = bool(self._streams) and self._streams[-1].is_of_shard
        self._seed(mix_seed(stream.seed, 1), is_in_shard)

    def _seed(self, seed: int, is_of_shard: bool) -> None:
        seed_torch(mix_seed(seed, self._tensor_rank + 1) if is_of_shard else mix_seed(seed, 0))
