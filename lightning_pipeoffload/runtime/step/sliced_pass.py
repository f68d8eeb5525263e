"""One F of a stage on a slice of the sequence (``num_sequence_slices``).

The step's own code sees whole sequences: before the blocks the microbatch, and between blocks a
shape-only tensor with the shape of the block's whole output. Only the blocks run on the slice. On
the last stage the step exits after the blocks, except for the last slice, for which the code after
the blocks gets the outputs of all slices, concatenated. Two blocks on one stage, two slices::

    training_step   embedding   block 0          block 1                head, loss
    slice 0         runs        on slice 0  ->   on slice 0, exit
    slice 1         runs        on slice 1  ->   on slice 1, concat ->  runs, returns
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten  # private: see runtime/leaves
from typing_extensions import override

from lightning_pipeoffload.runtime import BlockOutput, mix_seed, output_tensors
from lightning_pipeoffload.runtime.cut import StageExit, classify_blocks, running_checkpoint
from lightning_pipeoffload.runtime.sequence import BlockOnSlice, Dims, SlicedBlockCheck
from lightning_pipeoffload.runtime.shapes import ShapeOnly
from lightning_pipeoffload.runtime.step.in_flight import InFlight
from lightning_pipeoffload.runtime.step.stage_pass import StageContext, StagePass
from lightning_pipeoffload.runtime.users_code import in_brackets, running_user_line


class SlicedPass(StagePass):
    """One F on a slice of the sequence of a microbatch."""

    def __init__(
        self, context: StageContext, flight: InFlight, receive: Callable[[], list[Tensor]]
    ) -> None:
        super().__init__(context, flight, receive)
        dims, earlier = self._step_record.sequence, flight.earlier
        assert dims is not None
        assert earlier is not None
        self._dims, self._earlier, self._part = dims, earlier, flight.slice
        self._values: dict[int, tuple[ShapeOnly, Tensor]] = {}  # by the ids of what stands for them
        self._masks: dict[int, Tensor] = {}  # of several blocks, by id
        self._cuts: dict[int, tuple[Tensor, Tensor]] = {}  # by the ids of what is cut

    @override
    def run(self) -> Any:
        try:
            return super().run()
        finally:
            self._values.clear()  # a checkpoint in the stage's graph holds this
            self._masks.clear()
            self._cuts.clear()

    @override
    def _run_local_block(
        self, call: int, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        block, unit = self._context.chain.blocks[index], self._microbatch.index
        checks, given = self._step_record.slice_checks, (args, kwargs)
        if not self._part.index and checks.is_due(index, block, unit, given):
            self._check_block_on_slices(call, index, given)
        args, kwargs = self._cut(call, index, (args, kwargs))
        # The code before the blocks has drawn the same for each slice.
        seed = mix_seed(self._microbatch.seed, call, self._part.index)
        self._seed_segment(seed)
        if self._generators.exist:
            self._generators.seed(seed)
        output = super()._run_local_block(call, index, args, kwargs)
        return (
            output
            if call == self._record.exit
            else self._whole_output(call, output_tensors(output))
        )

    @override
    def _plain_call(self, index: int) -> Callable[..., Any]:
        plain = super()._plain_call(index)
        name = self._context.chain.block_name(index)
        return partial(BlockOnSlice(name, index, self._part, self._earlier).run, plain)

    @override
    def _received_output(self, call: int, output: BlockOutput) -> Any:
        return self._whole_output(call, self._entered.pop(call))

    def _whole_output(self, call: int, tensors: Sequence[Tensor]) -> Any:
        """Return the whole output of a call; before the last block it has no values."""
        output, context = self._step_record.outputs[call], self._context
        if call == len(self._record.calls) - 1:
            return output.fill(self._keep_or_concatenate(call, tensors))
        origins = context.chain.output_origins(self._record.calls[call])
        device = self._microbatch.device
        shapes = [ShapeOnly(meta, device, origins) for meta in output.meta_tensors]
        self._values = {id(s): (s, t) for s, t in zip(shapes, tensors, strict=True)}
        return output.fill(shapes)

    def _keep_or_concatenate(self, call: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        if not self._part.is_last:
            kept = [self._earlier.make_shared_leaf(self._part, tensor) for tensor in tensors]
            self._earlier.outputs.append(kept)
            self._has_exited = True
            raise StageExit([])
        slices = zip(*self._earlier.outputs, tensors, strict=True)
        dims = (dim for (dim, *_) in self._dims.outputs[call])
        return [torch.cat(parts, dim) for parts, dim in zip(slices, dims, strict=True)]

    def _check_block_on_slices(self, call: int, index: int, arguments: Any) -> None:
        """Check that a block may run on slices."""
        if running_checkpoint() is not None:
            raise ValueError(
                f"the step checkpoints {self._context.chain.block_name(index)}, which would run "
                f'again on whole sequences; leave that out, and use recompute="full"'
            )
        chain, dims, record = self._context.chain, self._dims, self._step_record
        case = arguments, dims.arguments[call], dims.outputs[call], record.sequence_slices
        if record.slice_checks.is_selected(index, partial(classify_blocks, chain, record)):
            plain = super()._plain_call(index)
            since = record.slice_checks.record_and_describe_check(index)
            SlicedBlockCheck(
                chain.block_name(index), chain.blocks[index], plain, *case, since
            ).check()
        leaves = zip(tree_flatten(arguments)[0], dims.arguments[call], strict=True)
        for place, (leaf, of) in enumerate(leaves):
            if len(of) == 2 and not isinstance(leaf, ShapeOnly):
                record.slice_checks.record_masked_value(
                    (call, place), leaf, of, record.sequence_slices
                )

    def _cut(self, call: int, index: int, arguments: Any) -> Any:
        leaves, form = tree_flatten(arguments)
        dims = self._dims.arguments[call]
        if len(leaves) != len(dims):
            raise ValueError(
                f"{self._context.chain.block_name(index)} gets {len(leaves)} arguments, and got "
                f"{len(dims)} when the step ran without values; with num_sequence_slices they "
                f"cannot depend on values{self._step_record.derivation_note}"
            )
        for place, (leaf, of) in enumerate(zip(leaves, dims, strict=True)):
            if len(of) == 2:
                self._start_mask_check((call, place), index, leaf, of)
        cut = [self._cut_leaf(index, leaf, of) for leaf, of in zip(leaves, dims, strict=True)]
        return tree_unflatten(cut, form)

    def _start_mask_check(self, place: tuple[int, int], index: int, mask: Any, dims: Dims) -> None:
        """Start to check that a mask does not let this slice attend to later slices.

        The first B of the microbatch reads the result, and raises ``ValueError`` if the mask does.
        A mask that several blocks get is checked once.

        Args:
            place: The call, and the mask's place among the leaves of its arguments.
            index: The index of the block.
            mask: The mask for the whole sequence.
            dims: The mask's dimensions of queries and keys.
        """
        if isinstance(mask, ShapeOnly) or id(mask) in self._masks:
            return
        self._masks[id(mask)] = mask
        is_open = self._step_record.slice_checks.start_mask_check(place, mask, dims, self._part)
        if is_open is not None:
            self._earlier.masks.append((self._context.chain.block_name(index), is_open))

    def _cut_leaf(self, index: int, leaf: Any, dims: Dims) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if isinstance(leaf, ShapeOnly):
            _, value = self._values.get(id(leaf), (None, None))
            if value is None:
                raise ValueError(
                    f"the step computes what {self._context.chain.block_name(index)} gets"
                    f"{in_brackets(running_user_line())} from outputs of blocks; with "
                    f"num_sequence_slices there is a slice of these only: let a block compute it, "
                    f"or use num_sequence_slices=1"
                )
            return value
        if dims and id(leaf) not in self._cuts:
            self._cuts[id(leaf)] = leaf, self._part.cut(leaf, dims)
        return self._cuts[id(leaf)][1] if dims else leaf
