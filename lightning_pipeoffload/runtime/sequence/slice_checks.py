"""When blocks are checked on slices, and the check that masks stay causal.

A check runs four forwards and backwards in float32, as long as some steps. So of each class of
alike blocks one is checked in batches 1, 2, 4, 8 and so on, each time another one. A block is also
checked when a number, flag or name among its attributes or arguments has changed, such as a
coefficient that a hook schedules; a tensor of one element on an accelerator is read a batch later,
without a wait. The values of masks differ in each batch. So each is checked in every batch, without
a wait for the device: no slice may attend to a later slice, whose keys do not exist yet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_pipeoffload.runtime import is_on_accelerator, leaves_of, start_host_copy
from lightning_pipeoffload.runtime.sequence.slices import Dims, SequenceSlice
from lightning_pipeoffload.runtime.shapes import ShapeOnly

_PLAIN = frozenset({bool, int, float, str, type(None)})
_FORBIDS = -1e4  # added to a score


class _BlockHistory(NamedTuple):
    unit: int
    num_batches: int
    state: list[Any]
    is_quiet: bool
    late: list[Callable[[], Tensor]]  # arguments of this batch, to be read in the next one


class SliceChecks:
    """The checks of the blocks of one record."""

    def __init__(self) -> None:
        self._seen: dict[int, _BlockHistory] = {}  # by block
        self._checked: dict[int, int] = {}  # the batch of a block's last check
        self._classes: Sequence[int] = ()
        self._members: defaultdict[int, list[int]] = defaultdict(list)  # blocks, by class
        self._forbidden: dict[tuple[int, int], float] = {}  # by call and argument

    def is_due(self, index: int, block: nn.Module, unit: int, arguments: Any = ()) -> bool:
        """Return whether to check a block or one like it; called for each microbatch.

        Args:
            index: The block's number.
            block: The block.
            unit: The index of its first slice in the plan.
            arguments: The arguments of its call.
        """
        seen = self._seen.get(index)
        if seen is not None and unit > seen.unit:  # of the same batch
            self._seen[index] = seen._replace(unit=unit)
            return False
        state = [v for part in block.modules() for v in vars(part).values() if type(v) in _PLAIN]
        leaves = [*leaves_of(arguments)]
        state += [leaf for leaf in leaves if type(leaf) in _PLAIN]
        numbers = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel() == 1]
        reads = [
            (leaf, start_host_copy(leaf)) for leaf in numbers if not isinstance(leaf, ShapeOnly)
        ]
        late = [read for leaf, read in reads if is_on_accelerator(leaf)]
        now = [read for leaf, read in reads if not is_on_accelerator(leaf)]
        state += [read().item() for read in (*now, *(seen.late if seen else ()))]
        if seen is None:
            seen = _BlockHistory(unit, 0, state, True, late)
        has_changed, num_batches = state != seen.state, seen.num_batches + 1
        self._seen[index] = _BlockHistory(unit, num_batches, state, not has_changed, late)
        # What changes in each batch is checked as if nothing did.
        return _is_power_of_two(num_batches) or (has_changed and seen.is_quiet)

    def is_selected(self, index: int, classify_blocks: Callable[[], Sequence[int]]) -> bool:
        """Return whether to check this block, not another one of its class, if a check is due.

        Args:
            index: The block's number.
            classify_blocks: Returns the class of each block; called once.
        """
        self._classes = self._classes or classify_blocks()
        members, num_batches = self._members[self._classes[index]], self._seen[index].num_batches
        if index not in members:
            members.append(index)
        num_checks = num_batches.bit_length() - 1
        return not _is_power_of_two(num_batches) or members[num_checks % len(members)] == index

    def record_and_describe_check(self, index: int) -> str:
        """Return the end of a refusal: the batches since the block's last check; record a check."""
        last, now = self._checked.get(index, 0), self._seen[index].num_batches
        self._checked[index] = now
        if not last:
            return ""
        return (
            f" (in batch {now} of these shapes; in batch {last} it computed the same: steps since "
            f"then may have been wrong)"
        )

    def record_masked_value(
        self, place: tuple[int, int], mask: Tensor, dims: Dims, slices: Sequence[SequenceSlice]
    ) -> None:
        """Record the value, such as -inf or False, that a mask has for all keys after a slice.

        A mask that has no such value for every slice is not recorded, and not checked.

        Args:
            place: The call of the block, and the index of the argument.
            mask: The argument.
            dims: Its dimensions of queries and of keys.
            slices: The slices.
        """
        number = float(_after_slice(slices[0], mask, dims).flatten()[0])
        if not any(_attends_to_later_keys(number, part, mask, dims) for part in slices[:-1]):
            self._forbidden[place] = number

    def start_mask_check(
        self, place: tuple[int, int], mask: Tensor, dims: Dims, part: SequenceSlice
    ) -> Callable[[], Tensor] | None:
        """Return a function that reads whether a mask lets a slice attend to later keys.

        None if there are no later keys, or :meth:`record_masked_value` did not record the mask.
        """
        number = self._forbidden.get(place)
        if number is None or part.is_last:
            return None
        return start_host_copy(_attends_to_later_keys(number, part, mask, dims))


def _is_power_of_two(number: int) -> bool:
    return number.bit_count() == 1


def _attends_to_later_keys(number: float, part: SequenceSlice, mask: Tensor, dims: Dims) -> Tensor:
    values = _after_slice(part, mask.detach(), dims)
    return (values > _FORBIDS if number <= _FORBIDS else values != number).any()


def _after_slice(part: SequenceSlice, mask: Tensor, dims: Dims) -> Tensor:
    """Return a mask's values for a slice's queries and the keys after the slice."""
    queries, keys = dims
    rows = mask.narrow(queries, part.start, part.stop - part.start)
    return rows.narrow(keys, part.stop, part.length - part.stop)
