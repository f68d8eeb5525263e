"""One F of a stage: a call of the user's step in which only the stage's blocks run.

Calls of earlier blocks return shapes, but for the last of them, which returns the tensors that the
previous stage sent. After the stage's last block an exception leaves the step with its output. Only
the last stage runs the head and the loss. Three blocks, one in each stage::

    training_step   embedding   block 0      block 1      block 2      head, loss
    stage 0         runs        runs, exit
    stage 1         shapes      hands on     runs, exit
    stage 2         shapes      shapes       hands on     runs         runs, returns
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime.compiled.block_compiler import uncompiled
from lightning_pipeoffload.runtime.contexts import NOTHING, together
from lightning_pipeoffload.runtime.cut.block_chain import BlockChain, StageExit
from lightning_pipeoffload.runtime.cut.checks import loss_in
from lightning_pipeoffload.runtime.cut.ownership import Ownership
from lightning_pipeoffload.runtime.cut.partition import Stage
from lightning_pipeoffload.runtime.cut.record import StepRecord
from lightning_pipeoffload.runtime.in_force import IN_FORCE
from lightning_pipeoffload.runtime.leaves import tensors_in
from lightning_pipeoffload.runtime.payload import BlockOutput, Received, enter
from lightning_pipeoffload.runtime.randomness import mix_seed, seed_all, segment_seeder
from lightning_pipeoffload.runtime.shapes.shape_only import (
    ShapeOnly,
    give_values,
    has_shapes,
    shape_only_leaves,
)
from lightning_pipeoffload.runtime.shapes.step_rules import StepRules, ValueNeededError
from lightning_pipeoffload.runtime.step.carried_values import carried_values
from lightning_pipeoffload.runtime.step.microbatch import Microbatch
from lightning_pipeoffload.runtime.step.recomputed_block import run_checkpointed
from lightning_pipeoffload.runtime.step.stage_gradients import OwnGradients
from lightning_pipeoffload.runtime.step.stage_graphs import StageGraphs
from lightning_pipeoffload.runtime.step.step_writes import Left, StepWrites
from lightning_pipeoffload.runtime.users_code.sources import Generators
from lightning_pipeoffload.runtime.users_code.step_call import StepCall
from lightning_pipeoffload.runtime.users_code.users_lines import in_brackets, users_line

_Outputs = dict[int, tuple[ShapeOnly, Tensor]]  # of blocks, each with what it was made of
_VALUES = frozenset({Tensor, nn.Parameter, type(None), bool, int, float, str})


def _are_values(arguments: Iterable[Any]) -> bool:
    """Whether all are plain tensors and numbers; most blocks take nothing else."""
    return all(type(argument) in _VALUES for argument in arguments)


@dataclass
class StageContext:
    """Shared by all F's of one stage.

    Attributes:
        stage: The stage.
        num_stages: The number of stages of the whole model.
        chain: The blocks of the user's module.
        ownership: The rank's parameters and buffers.
        writes: Attributes and buffers that the rank's steps write outside of the blocks.
        gradients: The stage's gradients of weights that other stages of the rank use too.
        generators: The random generators that the modules hold.
        recompute: What B computes again: "none", "cheap" (norms, activations, dropout) or "full"
            (blocks).
        graphs: The graphs of the stage's blocks; None: blocks run as they are written.
        is_first: Whether the step starts here.
        is_last: Whether the step ends here.
    """

    stage: Stage
    num_stages: int
    chain: BlockChain
    ownership: Ownership
    writes: StepWrites
    gradients: OwnGradients
    generators: Generators
    recompute: str = "none"
    graphs: StageGraphs | None = None

    def __post_init__(self) -> None:
        self.is_first = self.stage.index == 0
        self.is_last = self.stage.index == self.num_stages - 1
        self._outputs: tuple[StepRecord | None, _Outputs] = None, {}

    @cached_property
    def call(self) -> StepCall:
        """Describes the stage's calls of the user's step."""
        is_last_local = self.stage.index == self.writes.last_stage
        return StepCall(is_last=self.is_last, is_last_local=is_last_local)

    def outputs(self, record: StepRecord) -> _Outputs:
        """Return the outputs of blocks before the stage that each F may use again.

        To make one takes as long as all else that an F does for such a block, of which the last
        stages of a deep model have many.
        """
        if self._outputs[0] is not record:
            self._outputs = record, {}
        return self._outputs[1]

    def shapes_of(self, index: int, output: BlockOutput, device: torch.device) -> Any:
        """Return a block's output with tensors that have no value."""
        origins = self.chain.output_origins(index)
        return output.fill([ShapeOnly(meta, device, origins) for meta in output.metas])

    def around(self) -> AbstractContextManager[Any]:
        """Return the context of an F: attributes and generators as they are for this stage."""
        return together(
            self.writes.of_stage(self.stage.index),
            self.writes.hiding(self.stage, self.ownership),
            self.generators.kept(),
        )

    def written_tensors(self) -> list[Tensor]:
        """List the tensors that the stage's steps write in place and its backwards may read."""
        return self.writes.tensors_of(self.stage.index, self.ownership)


class StagePass:
    """One F: answers each call of a block.

    Args:
        context: Shared by all F's of the stage.
        microbatch: The microbatch to run.
        receive: Waits for the tensors of the previous stage.
        received: Collects the gradients of these; None: no backward follows.
    """

    def __init__(
        self,
        context: StageContext,
        microbatch: Microbatch,
        receive: Callable[[], list[Tensor]],
        received: Received | None,
    ) -> None:
        self._context = context
        self._microbatch = microbatch
        self._receive = receive
        self._received = received
        self._left = False
        self._called = ""
        self._is_in_block = False
        self.left: Left = []
        self._record = record = microbatch.record
        self._generators = context.generators
        self._seed_segment = segment_seeder(record.draws_beside_torch)
        self._start, self._stop = context.stage.blocks.start, context.stage.blocks.stop
        self._carried = carried_values(record, self._start, None if context.is_last else self._stop)
        self._outputs = context.outputs(record) if self._carried is None else {}
        self._counter = self._carried if self._carried and self._carried.counts else None

    def place(self) -> tuple[str, bool]:
        """Return the name of the stage's block called last, and whether it is still running."""
        return self._called, self._is_in_block

    def run(self) -> Any:
        """Call the step; return the tensors for the next stage, on the last stage its result."""
        context, generators = self._context, self._generators
        seed = mix_seed(self._microbatch.seed, 0)
        seed_all(seed)
        with context.around():
            generators.seed(seed)
            if context.is_first:
                context.ownership.show(context.stage.index)
            else:
                context.ownership.hide()
            try:
                with context.chain.running(self), self._counter or NOTHING:
                    result = self._microbatch.run(context.call)
                output = self._check_result(result)
            except StageExit as leaving:
                leaving.__traceback__ = None  # its frames hold every activation
                output = leaving.payload
            except ValueNeededError as error:
                raise ValueError(self._explain(error)) from None
            finally:
                context.ownership.restore()
            self.left = context.writes.left()
        return output

    def call_block(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block of the stage; hand over the payload; return shapes for blocks before that."""
        if index >= self._start:
            output = self._run_own(index, args, kwargs)
        else:
            known = self._outputs.get(index)
            if known is not None and known[0].is_as_made(known[1]):
                output = known[0]
            else:
                output = self._pass_remote(index, args, kwargs)
        # Not before the block: a checkpoint around its call has saved the generator by then. Also
        # after a remote block: several stages may use what the step draws between the blocks.
        seed = mix_seed(self._microbatch.seed, index + 1)
        self._seed_segment(seed)
        if self._generators.exist:
            self._generators.seed(seed)
        return output

    def _pass_remote(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._paused():
            output = self._output_of(index, args, kwargs)
            if index == self._start - 1:
                return self._hand_over(index, output)
            shapes = self._context.shapes_of(index, output, self._microbatch.device)
            if isinstance(shapes, ShapeOnly) and self._record.shapes_suffice(index):
                self._outputs[index] = shapes, shapes.meta
            return self._leave_block(index, shapes)

    def _run_own(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        context = self._context
        chain, name = context.chain, context.chain.block_name(index)
        if not (_are_values(args) and _are_values(kwargs.values())) and has_shapes((args, kwargs)):
            args, kwargs = give_values((args, kwargs))
            for leaf in shape_only_leaves((args, kwargs)):
                raise ValueNeededError(name, leaf.origins)
        run, is_open = chain.plain_call(index), index in self._record.opened
        self._called, self._is_in_block = name, True
        with NOTHING if is_open else self._paused():
            # A value that leaves an open block through a hook would come from its first run only.
            if self._received is None or is_open:
                output = run(*args, **kwargs)
            elif context.recompute == "full":
                written = context.written_tensors()
                output = run_checkpointed(chain.blocks[index], run, args, kwargs, written)
            elif context.graphs is not None:
                output = context.graphs.call(index, args, kwargs, self._record)
            else:
                output = run(*args, **kwargs)
        self._is_in_block = False
        if self._carried is not None:
            output = self._leave_block(index, output)
        if index == self._stop - 1 and not context.is_last:
            self._left = True
            beside = self._carried.to_hand_on() if self._carried else ()
            raise StageExit([*tensors_in(output), *beside])
        return output

    def _output_of(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockOutput:
        output = self._record.outputs[index]
        if self._record.shapes_suffice(index):
            return output
        hidden = self._context.ownership.hiding(self._context.chain.block_name(index))
        dropping = IN_FORCE.during(StepRules(drop=lambda tensor: True))
        with torch.no_grad(), uncompiled(), hidden, dropping, self._looking_into(index):
            found = self._context.chain.plain_call(index)(*args, **kwargs)
        return output if output.is_template else BlockOutput.of(found)

    def _looking_into(self, index: int) -> AbstractContextManager[None]:
        is_open = index in self._record.opened
        return self._counter.resumed() if self._counter and is_open else NOTHING

    def _paused(self) -> AbstractContextManager[None]:
        return self._counter.paused() if self._counter else NOTHING

    def _leave_block(self, index: int, output: Any) -> Any:
        return self._carried.leave_block(index, output) if self._carried else output

    def _hand_over(self, index: int, output: BlockOutput) -> Any:
        # Here, not before the step: its beginning runs while the tensors are on their way.
        tensors = self._receive()
        entered = tensors if self._received is None else enter(tensors, self._received)
        count = len(output.payload)
        if self._carried:
            self._carried.deliver(entered[count:])
        self._context.ownership.show(self._context.stage.index)
        return self._leave_block(index, output.fill(entered[:count]))

    def _check_result(self, result: Any) -> Any:
        if self._left:
            raise RuntimeError(
                "the step caught the signal by which a stage leaves it, so it has an `except:` or "
                "`except BaseException:` around its blocks; use `except Exception:`"
            )
        if not self._context.is_last:
            self._refuse_early_end(result)
        if type(result) is Tensor:
            return result
        result = give_values(result)
        for leaf in shape_only_leaves(result):
            raise ValueError(self._explain(ValueNeededError("the step's result", leaf.origins)))
        return result

    def _refuse_early_end(self, result: Any) -> None:
        if self._received is not None:
            loss_in(result)  # raises the same message on every stage
        raise ValueError(
            f"the step returned before it called "
            f"{self._context.chain.block_name(self._context.stage.blocks.stop - 1)}, but called it "
            f"for another batch of this shape; a pipeline needs each entry of "
            f"{self._context.chain.name} called once and in order, in every step"
        )

    def _explain(self, error: ValueNeededError) -> str:
        return (
            f"{error}, which is not on stage {self._context.stage.index}"
            f"{in_brackets(users_line(error))}; let the blocks take it and return it beside their "
            f"output, or compute it from the batch"
        )
