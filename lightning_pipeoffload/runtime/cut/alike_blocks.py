"""Traces of further shapes, which run one block of each class of alike blocks and skip the others.

Most of a trace's time is spent in the blocks, and most blocks of a model are alike. The classes
(:mod:`.block_classes`) are those of a complete trace, in which all blocks ran, of the same kind of
step with other shapes. In the new trace a block is skipped if its arguments, and the operations of
its segment before it, equal those of the first block of its class. The record then lacks entries,
such as the segments that use the weights of a skipped block. These are copied from the complete
record; all other entries have to agree with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.cut.block_classes import SegmentState, SegmentWork, find_firsts
from lightning_pipeoffload.runtime.cut.carried_values import Crossing
from lightning_pipeoffload.runtime.cut.record import StepRecord
from lightning_pipeoffload.runtime.direct_function import DirectFunction
from lightning_pipeoffload.runtime.leaves import leaves_of, map_output, output_tensors
from lightning_pipeoffload.runtime.sequence.slice_checks import SliceChecks
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.shapes.sharding import OF_SHARD

_FLOPS = "forward_flops", "input_flops", "weight_flops"


class _Inputs(NamedTuple):
    """The arguments behind a tensor that a block returns, by their places."""

    is_one_of_them: bool
    places: list[int]  # to which it leads back


@dataclass
class _Done:
    """The work and output of the first block of a class."""

    before: Any  # the work of its segment until then
    work: SegmentState
    flops: list[int]
    training_flops: int  # of the block alone
    output: Any
    inputs: list[_Inputs]  # of each of its tensors


class AlikeBlocks:
    """Skips blocks of one trace that are like a block that has run.

    Args:
        chain: The blocks.
        whole: The complete record of the same kind of step with other shapes.

    Attributes:
        skipped: The blocks that did not run.
    """

    def __init__(self, chain: BlockChain, whole: StepRecord) -> None:
        self._chain = chain
        self._whole, self._firsts = whole, find_firsts(chain, whole)
        self._stand_for_others = {*self._firsts.values()}
        self._done: dict[int, _Done] = {}
        self.skipped: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._firsts)

    def call(
        self,
        index: int,
        arguments: Any,
        run: Callable[[], Any],
        record: StepRecord,
        work: SegmentWork,
        use: Callable[[Tensor], None],
    ) -> Any:
        """Run a block, or skip it and return shapes like the first block of its class returned.

        Args:
            index: The index of the block.
            arguments: Its arguments.
            run: Runs the block and returns its output.
            record: The record of this trace.
            work: The hashes of the segments' operations.
            use: Records that the block's segment uses a tensor.
        """
        flops = [getattr(record, name) for name in _FLOPS]
        before = work.state(index).digest, [each[index] for each in flops]
        done = self._done.get(self._firsts.get(index, index))
        if done is not None and done.before == before:
            self.skipped.add(index)
            work.put(index, done.work)
            for each, count in zip(flops, done.flops, strict=True):
                each[index] = count
            record.training_flops += done.training_flops
            return self._make_output(index, [*leaves_of(arguments)], done, use)
        training_flops = record.training_flops
        output = run()
        outputs = output_tensors(output)
        if index in self._stand_for_others and all(isinstance(x, ShapeOnly) for x in outputs):
            self._done[index] = _Done(
                *(before, work.state(index), [each[index] for each in flops]),
                *(record.training_flops - training_flops, output),
                _inputs_behind(outputs, [*leaves_of(arguments)]),
            )
        return output

    def _make_output(
        self, index: int, arguments: list[Any], done: _Done, use: Callable[[Tensor], None]
    ) -> Any:
        origins, inputs = self._chain.output_origins(index), iter(done.inputs)

        def alike(leaf: Any) -> Any:
            if not isinstance(leaf, ShapeOnly):
                return leaf
            is_one_of_them, places = next(inputs)
            tensors = [arguments[place] for place in places]
            if is_one_of_them:
                return tensors[0]
            for tensor in tensors:
                use(tensor)
            trains = leaf.requires_grad and not tensors
            output = ShapeOnly(leaf.meta, leaf.device, origins | leaf.origins & OF_SHARD, trains)
            return _LeadBack.apply(output, *tensors) if tensors else output

        return map_output(alike, done.output)

    def complete(self, record: StepRecord, whole: StepRecord) -> StepRecord | None:
        """Return ``record`` with the entries of the skipped blocks added, from ``whole``.

        Args:
            record: The record of this trace, in which one block of each class ran.
            whole: A complete record in which the step read the same booleans from the batch.

        Returns:
            The completed record; None if the two records differ in more than sizes.
        """
        skipped = self.skipped
        if whole is not self._whole and not skipped <= find_firsts(self._chain, whole).keys():
            return None
        for name, segments in whole.segments.items():
            record.segments[name] |= segments & skipped
        for name, uses_of_whole in whole.weight_uses.items():
            uses = {use for use in uses_of_whole if use[0] in skipped}
            if uses:
                record.weight_uses[name] = record.weight_uses.get(name, set()) | uses
                if record.trained is not None:
                    record.trained.add(name)
        for block in skipped & whole.recompute_obstacles.keys():
            record.recompute_obstacles[block] = whole.recompute_obstacles[block]
        expected = copy(whole)
        expected.result_counts = record.result_counts  # there may be other numbers of samples
        if record.structure != expected.structure or not _cross_alike(record, whole):
            return None
        completed = expected.with_sized(record.sized)
        completed.is_short, completed.pairs = True, record.pairs
        completed.sequence, completed.slice_checks = None, SliceChecks()  # may differ by length
        return completed


def _cross_alike(record: StepRecord, whole: StepRecord) -> bool:
    """Whether the same values cross from segment to segment, whatever their shapes."""
    if [*map(_without_shape, record.crossings)] != [*map(_without_shape, whole.crossings)]:
        return False
    return all(
        [(spec.dtype, spec.requires_grad, spec.gets_gradient) for spec in mine.payload]
        == [(spec.dtype, spec.requires_grad, spec.gets_gradient) for spec in other.payload]
        and (mine.treespec, mine.is_template) == (other.treespec, other.is_template)
        for mine, other in zip(record.outputs, whole.outputs, strict=True)
    )


def _without_shape(crossing: Crossing) -> Crossing:
    return replace(crossing, shape=torch.Size(), stride=None)


def _inputs_behind(tensors: Sequence[Tensor], arguments: Sequence[Any]) -> list[_Inputs]:
    by_id = {id(leaf): place for place, leaf in enumerate(arguments)}
    places = {
        (leaf.grad_fn, leaf.output_nr): place
        for place, leaf in enumerate(arguments)
        if isinstance(leaf, ShapeOnly) and leaf.grad_fn is not None
    }
    return [
        _Inputs(True, [by_id[id(tensor)]])
        if id(tensor) in by_id
        else _Inputs(False, _find_behind(tensor, places))
        for tensor in tensors
    ]


def _find_behind(tensor: Tensor, places: Mapping[Any, int]) -> list[int]:
    waiting = [(tensor.grad_fn, tensor.output_nr)]
    seen, indices = {*waiting}, set()
    while waiting:
        edge = waiting.pop()
        if edge in places:
            indices.add(places[edge])
        elif edge[0] is not None:
            more = set(edge[0].next_functions) - seen
            seen |= more
            waiting += more
    return sorted(indices)


class _LeadBack(DirectFunction):
    """Connects a skipped block's output to its inputs in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, tensor: ShapeOnly, *inputs: Tensor) -> ShapeOnly:
        return ShapeOnly(tensor.meta, tensor.device, tensor.origins)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("a trace runs no backward through a block that it skips")
