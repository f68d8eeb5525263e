"""One F of a stage: a call of the user's step in which only the stage's blocks run.

Calls of blocks of earlier stages return shape-only tensors, except for the last such call, which
returns the tensors received from the previous stage. After the stage's last block an exception
(:class:`.StageExit`) leaves the step. Only the last stage runs the head and the loss. Three blocks,
one on each stage::

    training_step   embedding   block 0      block 1      block 2      head, loss
    stage 0         runs        runs, exit
    stage 1         shapes      received     runs, exit
    stage 2         shapes      shapes       received     runs         runs, returns

If the step calls blocks several times, the stage receives once, before its first block, and exits
after the last call of its own or an earlier block. Until then calls of later blocks return shapes::

    training_step   block 0   block 1              block 0      block 1
    stage 0         runs      shapes               runs, exit
    stage 1         received  runs                 received     runs, returns
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime import (
    ACTIVE_SETTINGS,
    NOTHING,
    BlockOutput,
    combine_contexts,
    has_drawn_outside_torch,
    map_in_place,
    mix_seeds,
    output_tensors,
    seed_all,
    start_stage_graph,
)
from lightning_pipeoffload.runtime.compiled import force_eager
from lightning_pipeoffload.runtime.cut import (
    ActiveStepRun,
    BlockChain,
    CarriedValues,
    SplitModule,
    Stage,
    StageExit,
    describe_required_calls,
    loss_in,
)
from lightning_pipeoffload.runtime.shapes import (
    KernelsOnZeros,
    ShapeOnly,
    StepRules,
    ValueNeededError,
    has_shape_only,
    shape_only_leaves,
    substitute_values,
)
from lightning_pipeoffload.runtime.step.in_flight import InFlight
from lightning_pipeoffload.runtime.step.recomputed_block import run_checkpointed
from lightning_pipeoffload.runtime.step.stage_gradients import SwappedGradients
from lightning_pipeoffload.runtime.step.step_writes import StepWrites, WrittenByForward
from lightning_pipeoffload.runtime.users_code import (
    RandomGenerators,
    StepCall,
    in_brackets,
    running_user_line,
    users_line,
)
from lightning_pipeoffload.runtime.weight_grad import AddProduct, add_product_to_grad

_VALUES = frozenset({Tensor, nn.Parameter, type(None), bool, int, float, str})


def _have_plain_types(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether all are plain tensors and numbers; most blocks take nothing else."""
    for argument in args:
        if type(argument) not in _VALUES:
            return False
    return not kwargs or _have_plain_types((*kwargs.values(),), {})


@dataclass
class StageContext:
    """The objects and settings that all F's of one stage share.

    Attributes:
        stage: The stage.
        num_stages: The number of stages of the whole model.
        chain: The blocks of the user's module.
        tensors: The parameters and buffers of the module; an F sees those of its stage.
        writes: Attributes and buffers that the rank's steps write outside of the blocks.
        gradients: The stage's gradients of weights that other stages of the rank also use.
        generators: The random generators that the modules hold.
        kernels: The Functions and modules that run on zeros where values are missing.
        recompute: What B recomputes: "none", "cheap" (norms, activation functions, dropout) or
            "full" (blocks).
        add_product: Adds a matrix product of W to a gradient.
        head_is_at_once: Whether weight gradients of the code after the blocks are computed in B.
        is_first: Whether this is the first stage of the model.
        is_last: Whether this is the last stage of the model.
    """

    stage: Stage
    num_stages: int
    chain: BlockChain
    tensors: SplitModule
    writes: StepWrites
    gradients: SwappedGradients
    generators: RandomGenerators
    kernels: KernelsOnZeros
    recompute: str = "none"
    add_product: AddProduct = add_product_to_grad
    head_is_at_once: bool = False

    def __post_init__(self) -> None:
        self.is_first = self.stage.index == 0
        self.is_last = self.stage.index == self.num_stages - 1
        self.draws_outside_torch = False

    @cached_property
    def call(self) -> StepCall:
        """Describes the stage's calls of the user's step."""
        is_last_local = self.stage.index == self.writes.last_local_stage
        return StepCall(is_last=self.is_last, is_last_local=is_last_local)

    def detect_draws_outside_torch(self, seed: int) -> None:
        """Seed numpy and Python for each block from now on if the step has drawn from them.

        A step may begin to draw after it was traced, as mixup does after a warm-up. In the first
        microbatch that does, a block's random numbers depend on the cut.

        Args:
            seed: The seed at the start of the step.
        """
        self.draws_outside_torch = has_drawn_outside_torch(seed)

    def shapes_of(self, index: int, output: BlockOutput, device: torch.device) -> Any:
        """Return the output of block ``index`` with shape-only tensors."""
        origins = self.chain.output_origins(index)
        return output.fill([ShapeOnly(meta, device, origins) for meta in output.meta_tensors])

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context of an F: it sets this stage's attributes, and restores generators."""
        attributes = self.writes.with_values_of_stage(self.stage)
        if not self.generators.exist:
            return attributes
        return combine_contexts(attributes, self.generators.restoring())

    def written_tensors(self) -> list[Tensor]:
        """List the tensors that the stage's steps write in place and its backwards may read."""
        return self.writes.written_tensors_of(self.stage.index)


class StagePass:
    """One F: one call of the user's step, in which :meth:`call_block` replaces calls of blocks.

    Args:
        context: Shared by all F's of the stage.
        flight: The microbatch on which the step is called.
        receive: Waits for the tensors of the previous stage, and returns them.
    """

    def __init__(
        self, context: StageContext, flight: InFlight, receive: Callable[[], list[Tensor]]
    ) -> None:
        self._context = context
        # Not the flight: a checkpoint in the stage's graph holds this, and the flight that graph.
        self._microbatch, self._received = flight.microbatch, flight.received
        self._receive = receive
        self._has_exited = False
        self._num_calls = 0
        self._called = -1
        self._is_in_block = False
        self._entered: dict[int, Sequence[Tensor]] = {}  # outputs for later calls
        self._sent: list[Tensor] = []
        self.written: WrittenByForward | None = None
        record = flight.record
        self._record, self._step_record = record, flight.microbatch.record
        # Of the code before the first block, and of that after each call of a block.
        self._seeds = mix_seeds((flight.microbatch.seed,), range(len(record.calls) + 1))
        self._generators = context.generators
        self._seed_segment = seed_all if context.draws_outside_torch else record.seed_segment
        self._start, self._stop = context.stage.blocks.start, context.stage.blocks.stop
        self._recomputes = context.recompute == "full" and flight.received is not None
        self._carried = self._counter = None
        if record.received_values or record.sent_values:
            self._carried = CarriedValues(
                record.received_values, record.sent_values, self._step_record.derivation_note
            )
            self._counter = self._carried if self._carried.counts else None
        self._shape_outputs = {} if self._carried else record.shape_outputs

    def last_called_block(self) -> tuple[str, bool]:
        """Return the name of the stage's block called last, and whether it is still running."""
        name = "" if self._called < 0 else self._context.chain.block_name(self._called)
        return name, self._is_in_block

    def run(self) -> Any:
        """Call the step; return the tensors for the next stage, or on the last stage its result."""
        context = self._context
        seed = self._seeds[0]
        seed_all(seed)
        if self._generators.exist:
            self._generators.seed(seed)
        if context.is_first:
            context.tensors.show(context.stage.index)
        else:
            context.tensors.hide()
        try:
            with ActiveStepRun(context.chain, self):
                if self._counter is None and not self._record.may_call_kernels:
                    result = self._microbatch.run(context.call)
                else:
                    result = self._run_watched()
            output = self._check_result(result)
        except StageExit as leaving:
            leaving.__traceback__ = None  # its frames hold every activation
            output = leaving.to_send
        except (ValueNeededError, Exception) as error:
            if (earlier := _exit_before(error)) is not None:
                output = earlier.to_send
            elif isinstance(error, ValueNeededError):
                raise ValueError(self._explain(error)) from None
            else:
                raise
        finally:
            context.tensors.restore()
        if context.writes.is_by_users:
            self.written = context.writes.written_by_forward()
        if self._microbatch.index == 0 and self._seed_segment is not seed_all:  # once a batch
            context.detect_draws_outside_torch(seed)
        return output

    def _run_watched(self) -> Any:
        kernels = (
            self._context.kernels.running_on_zeros() if self._record.may_call_kernels else NOTHING
        )
        with kernels, self._counter or NOTHING:
            return self._microbatch.run(self._context.call)

    def call_block(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of block ``index``: run it if it is the stage's, else do not.

        Blocks of other stages return the received tensors, or shape-only ones.

        Raises:
            StageExit: This was the stage's last call; it has the tensors to send.
            ValueError: The traced step did not make this call.
        """
        call, record = self._num_calls, self._record
        self._num_calls = call + 1
        if call >= len(record.calls) or record.calls[call] != index:
            self._refuse_call(index)
        if self._start <= index < self._stop:
            output = self._run_local_block(call, index, args, kwargs)
        else:
            earlier = self._shape_outputs.get(call)
            if earlier is not None and earlier[0].is_unmodified(earlier[1]):
                output = earlier[0]
            else:
                output = self._skip_remote_block(call, index, args, kwargs)
        if call == record.exit:
            self._has_exited = True
            sent, self._sent = self._sent, []
            carried = self._carried.tensors_to_send() if self._carried else ()
            raise StageExit([*sent, *carried], output)
        # Not before the block: a checkpoint around its call has saved the generator by then. Also
        # after a remote block: several stages may use what the step draws between the blocks.
        self._seed_segment(self._seeds[call + 1])
        if self._generators.exist:
            self._generators.seed(self._seeds[call + 1])
        return output

    def _skip_remote_block(
        self, call: int, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._carried is None:
            return self._remote_output(call, index, args, kwargs)
        with self._paused():
            output = self._remote_output(call, index, args, kwargs)
            return self._carried.leave_block(call, output)

    def _remote_output(
        self, call: int, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        suffices = self._record.output_shapes_suffice[call]
        output = self._step_record.outputs[call]
        if not suffices:
            output = self._rerun_for_shapes(output, index, args, kwargs)
        if call == self._record.entry:
            self._enter_stage()
        if call in self._entered:
            return self._received_output(call, output)
        shapes = self._context.shapes_of(index, output, self._microbatch.device)
        if isinstance(shapes, ShapeOnly) and suffices and call != self._record.entry:
            self._shape_outputs[call] = shapes, shapes.meta
        return shapes

    def _received_output(self, call: int, output: BlockOutput) -> Any:
        return output.fill(self._entered.pop(call))

    def _run_local_block(
        self, call: int, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not _have_plain_types(args, kwargs) and has_shape_only((args, kwargs)):
            args, kwargs = substitute_values((args, kwargs), map_in_place)
            # A list of both views' values may hold what a later stage computes: its block does not.
            leaves = shape_only_leaves((args, kwargs))
            for leaf in leaves if self._step_record.calls.is_sequential else ():
                raise ValueNeededError(self._context.chain.block_name(index), leaf.origins)
        run = self._plain_call(index)
        # A value that leaves an open block through a hook would come from its first run only.
        if self._recomputes and index not in self._step_record.opened:
            run = self._checkpointed(index, run)
        self._called, self._is_in_block = index, True
        if self._carried is None:
            output = run(*args, **kwargs)
        else:
            with NOTHING if index in self._step_record.opened else self._paused():
                output = run(*args, **kwargs)
            output = self._carried.leave_block(call, output)
        self._is_in_block = False
        if call in self._record.sent:
            self._sent += output_tensors(output)
            if call != self._record.exit:  # what follows is of later stages
                shapes = BlockOutput.of(output)
                return self._context.shapes_of(index, shapes, self._microbatch.device)
        return output

    def _plain_call(self, index: int) -> Callable[..., Any]:
        return self._context.chain.plain_calls[index]

    def _checkpointed(self, index: int, run: Callable[..., Any]) -> Callable[..., Any]:
        block, written = self._context.chain.blocks[index], self._context.written_tensors()
        state = written, self._generators
        return lambda *args, **kwargs: run_checkpointed(block, run, args, kwargs, *state)

    def _rerun_for_shapes(
        self, output: BlockOutput, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BlockOutput:
        hidden = self._context.tensors.hiding(self._context.chain.block_name(index))
        dropping = ACTIVE_SETTINGS.during(StepRules(drop=lambda tensor: True))
        with torch.no_grad(), force_eager(), hidden, dropping, self._looking_into(index):
            result = self._context.chain.plain_calls[index](*args, **kwargs)
        return output if output.is_template else BlockOutput.of(result)

    def _looking_into(self, index: int) -> AbstractContextManager[None]:
        is_open = index in self._step_record.opened
        return self._counter.resumed() if self._counter and is_open else NOTHING

    def uncounted(self) -> AbstractContextManager[None]:
        """Exclude torch functions called within the context from the numbering of carried values.

        A library calls them, such as a checkpoint, not the user's step.
        """
        return self._counter.uncounted() if self._counter else NOTHING

    def _paused(self) -> AbstractContextManager[None]:
        return self._counter.paused() if self._counter else NOTHING

    def _enter_stage(self) -> None:
        # Here, not before the step: its beginning runs while the tensors are on their way.
        entered: Sequence[Tensor] = (tensors := self._receive())
        if self._received is not None and torch.is_grad_enabled():
            entered = start_stage_graph(tensors, self._received)
        elif self._received is not None:  # in a no_grad of the step's; carried values train later
            with torch.inference_mode(False), torch.enable_grad():
                entered = start_stage_graph(tensors, self._received)
        if self._carried:
            self._carried.fill_stand_ins(entered[self._record.num_output_tensors :])
        self._context.tensors.show(self._context.stage.index)
        for call, places in self._record.received_outputs.items():
            self._entered[call] = entered[places]

    def _check_result(self, result: Any) -> Any:
        if self._has_exited:
            raise RuntimeError(
                "the step caught the signal by which a stage leaves it, so it has an `except:` or "
                "`except BaseException:` around its blocks; use `except Exception:`"
            )
        if not self._context.is_last:
            self._refuse_early_end(result)
        if type(result) is Tensor:
            return result
        result = substitute_values(result)
        for leaf in shape_only_leaves(result):
            raise ValueError(self._explain(ValueNeededError("the step's result", leaf.origins)))
        return result

    def _refuse_call(self, index: int) -> NoReturn:
        name, call = self._context.chain.block_name, self._num_calls - 1
        expected = self._record.calls[call : call + 1]
        instead = f"called {name(expected[0])}" if expected else "called no more blocks"
        raise ValueError(
            f"the step calls {name(index)}{in_brackets(running_user_line())}, and {instead} when "
            f"it ran without values; in a pipeline the blocks that a step calls cannot depend on "
            f"values, attributes or the batch's number: call them in every step, and choose, as "
            f"in x = torch.where(wanted, block(x), x){self._step_record.derivation_note}"
        )

    def _refuse_early_end(self, result: Any) -> None:
        if self._received is not None:
            loss_in(result)  # raises the same message on every stage
        last = self._context.chain.block_name(self._record.calls[self._record.exit])
        raise ValueError(
            f"the step returned before it called {last}, but called it "
            f"for another batch of this shape; {describe_required_calls(self._context.chain)}, in "
            f"every step"
        )

    def _explain(self, error: ValueNeededError) -> str:
        return (
            f"{error}, which is not on stage {self._context.stage.index}"
            f"{in_brackets(users_line(error))}; let the blocks take it and return it with their "
            f"output, or compute it from the batch"
        )


def _exit_before(error: BaseException) -> StageExit | None:
    """Return the exit from a stage during which an error has been raised.

    While the step exits, ``finally`` and ``__exit__`` run, and may use values that only a later
    stage has: there they complete.
    """
    context = error.__context__
    while context is not None and not isinstance(context, StageExit):
        context = context.__context__
    return context
