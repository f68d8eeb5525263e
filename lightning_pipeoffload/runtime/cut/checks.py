"""Refuses steps that cannot be cut; the error has the reason, the line and a remedy.

Calls of blocks are checked while the step is traced, see :mod:`.call_checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

from torch import Tensor, nn

from lightning_pipeoffload.runtime.compiled import is_compiled
from lightning_pipeoffload.runtime.cut.argument_writes import ArgumentWrite
from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.cut.carried_values import CarriedValue
from lightning_pipeoffload.runtime.cut.partition import (
    Stage,
    stage_indices_running,
    stages_from_ends,
)
from lightning_pipeoffload.runtime.cut.record import StepRecord
from lightning_pipeoffload.runtime.cut.split_module import SharedWeight
from lightning_pipeoffload.runtime.shapes import describe_origins
from lightning_pipeoffload.runtime.users_code import Attribute, in_brackets
from lightning_pipeoffload.runtime.weight_grad import has_hooks

SKIP_A_BATCH = (
    "and to skip a bad batch, zero the gradients in on_after_backward, or leave out the step in "
    "optimizer_step"
)


def loss_in(result: Any) -> Tensor:
    """Return the loss from the result of a training step, as Lightning does.

    Raises:
        ValueError: The result has no loss.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        returned = "None" if result is None else type(result).__name__
        raise ValueError(
            f"the training step returned {returned} without a loss, while the other stages wait "
            f"for the batch's backward; return the loss, {SKIP_A_BATCH}"
        )
    return loss


def check_recompute_full(record: StepRecord, chain: BlockChain) -> None:
    """Refuse ``recompute="full"`` of blocks that cannot run again in a backward.

    Raises:
        ValueError: Such a block exists; names it, the obstacle and its line.
    """
    for block, obstacle in _obstacles(record, chain):
        raise ValueError(
            f'recompute="full" cannot run {block} again in the backward, since it {obstacle}; use '
            f'recompute="cheap" or "none", or change that'
        )


def _obstacles(record: StepRecord, chain: BlockChain) -> Iterator[tuple[str, str]]:
    reasons = (
        (record.backwards.in_blocks, "starts a backward of its own"),
        (record.writes.inputs, "writes its input in place"),
    )
    for lines, obstacle in reasons:
        for block, line in lines.items():
            if block not in record.opened:  # which is not computed again
                yield chain.block_name(block), f"{obstacle}{in_brackets(line)}"


def recompute_risk(record: StepRecord, chain: BlockChain) -> str:
    """Return why recomputed blocks may differ from the forward; "" if no reason is known.

    A block that reads an attribute which the step writes gets the value of a later microbatch.
    A trace does not show reads of attributes.
    """
    for block, obstacle in _obstacles(record, chain):
        return f"{block} {obstacle}"
    in_blocks = {id(part) for block in chain.blocks for part in block.modules()}
    for write in record.writes.attributes:
        if write.is_users and (write.point.is_in_block or id(write.variable.part) in in_blocks):
            return f"the step writes {write.variable.label}{in_brackets(write.line)}"
    return ""


def check_slices(record: StepRecord, chain: BlockChain, module: nn.Module, compile: bool) -> None:
    """Refuse ``num_sequence_slices`` unless sequences flow only from block to block.

    Raises:
        ValueError: A value is used around blocks, or a block does not support slices; names the
            block or line, and a remedy.
    """
    for reason in (*_obstacles_to_slices(record, chain, compile), *_hooks(record, chain, module)):
        raise ValueError(
            f"num_sequence_slices needs a step that hands its sequences from block to block only: "
            f"{reason}; change that, or use num_sequence_slices=1"
        )


def _obstacles_to_slices(record: StepRecord, chain: BlockChain, compile: bool) -> Iterator[str]:
    if not record.calls.is_sequential:
        yield "the step calls blocks several times"
    if record.backwards.are_any:
        yield "the step starts a backward of its own"
    for carried in record.carried_values:
        line = in_brackets(carried.line)
        yield f"it uses what was computed from {_origins(carried.origins)} after blocks{line}"
    for write in record.writes.attributes:
        if write.is_users and write.point.is_in_block:
            name = chain.block_name(write.point.segment)
            yield f"{name} writes {write.variable.label}{in_brackets(write.line)}"
    for index, block in enumerate(chain.blocks):
        does = _obstacle_in(block, compile, record, index)
        if does:
            yield f"{chain.block_name(index)} {does}"


def _hooks(record: StepRecord, chain: BlockChain, module: nn.Module) -> Iterator[str]:
    for name, parameter in module.named_parameters():
        if has_hooks(parameter) and any(s < len(chain) for s in record.segments.get(name, ())):
            yield f"a hook on {name} would get the gradient of each slice"


def _obstacle_in(block: nn.Module, compile: bool, record: StepRecord, index: int) -> str:
    if not record.output_shapes_suffice(index):
        return "returns more than tensors, or puts some into an attribute, an argument or a hook"
    if compile or is_compiled(block):
        return "is compiled"
    if any(hasattr(child, "track_running_stats") for child in block.modules()):
        return "has a norm over samples and tokens (BatchNorm)"
    for path, child in block.named_modules():
        for name, _ in child.named_buffers(path, recurse=False):
            if Attribute(child, name.rpartition(".")[2]) in record.writes.in_place:
                return f"writes its buffer {name}"
    return ""


def check_step(
    record: StepRecord,
    chain: BlockChain,
    stages: Sequence[Stage],
    owning_stages: Callable[[str], frozenset[int]],
) -> None:
    """Refuse a step that cannot be cut between these stages.

    Raises:
        ValueError: The step cannot be cut so; names the line, and code to write instead.
    """
    for message in _StepChecks(record, chain, stages).refusals(owning_stages):
        raise ValueError(message)


def impossible_cuts(
    record: StepRecord, chain: BlockChain, segments_of: Callable[[str], Set[int]]
) -> frozenset[int]:
    """Return the segments before which a step cannot be cut.

    Args:
        record: The record of the step.
        chain: The blocks.
        segments_of: Returns the segments that need a parameter or buffer.
    """

    def is_refused(*starts: int) -> bool:
        stages = stages_from_ends((*starts, len(chain)))  # the last may have no block
        checks = _StepChecks(record, chain, stages)
        return any(checks.refusals(lambda name: stage_indices_running(stages, segments_of(name))))

    blocks = range(1, len(chain) + 1)  # the last: before the code after all of them
    if not is_refused(*blocks):
        return frozenset()
    return frozenset(block for block in blocks if is_refused(block))


class _StepChecks:
    def __init__(self, record: StepRecord, chain: BlockChain, stages: Sequence[Stage]) -> None:
        self._record, self._chain, self._stages = record, chain, stages
        self._stage_of = {segment: stage.index for stage in stages for segment in stage.segments}
        self._last_start = stages[-1].blocks.start

    def refusals(self, owning_stages: Callable[[str], frozenset[int]]) -> Iterator[str]:
        """Yield the reasons why the step cannot be cut."""
        yield from self._weight_writes(owning_stages)
        yield from self._unrepeatable()
        yield from self._brief_hooks()
        yield from self._assumed()
        yield from self._own_backwards()
        yield from self._hooked_spans()
        yield from self._carried_values()
        yield from self._aliases()
        yield from self._argument_writes()

    def _weight_writes(self, owning_stages: Callable[[str], frozenset[int]]) -> Iterator[str]:
        for name, segment, line, is_new in self._record.writes.weights:
            others = owning_stages(name) - {self._stage_of[segment]}
            if others:
                is_after = segment == len(self._chain)
                place = "after the blocks" if is_after else f"before {self._block(segment)}"
                yield (
                    f"the step writes {name} {place}{in_brackets(line)}, on stage "
                    f"{self._stage_of[segment]}, but stage {min(others)} has this weight too and "
                    f"would not see it; write it between batches, such as in "
                    f"on_train_batch_start(), or in code that only the stage of its block runs"
                )
            elif is_new and self._chain.enclosing_block(name) is None:
                yield (
                    f"the step assigns another parameter to {name}{in_brackets(line)}, which "
                    f"neither the optimizer nor a checkpoint would see; write its value in place, "
                    f"with torch.no_grad() and copy_()"
                )

    def _unrepeatable(self) -> Iterator[str]:
        entry = self._record.unrepeatable
        if entry is not None and entry.segment < self._last_start:
            yield (
                f"{entry.name}(){in_brackets(entry.line)} returns another value each time that the "
                f"step runs from the same state, so stages would have different values; take its "
                f"input from the batch, from an attribute of the module, or from a random "
                f"generator: torch's, numpy's or Python's global one, or an attribute of the module"
            )

    def _brief_hooks(self) -> Iterator[str]:
        for block in sorted(self._record.opened & self._record.hooks.brief):
            yield (
                f"the step uses a value that a hook on {self._block(block)} has stored, and "
                f"registers and removes that hook itself, but only the last stage reaches the code "
                f"that removes it; register it once, in __init__ or in setup()"
            )

    def _assumed(self) -> Iterator[str]:
        for block, line in self._record.assumed.items():
            if block >= self._last_start or self._record.output_shapes_suffice(block):
                continue
            what = (
                "puts into an attribute, an argument or a hook what is used after it"
                if self._record.is_template(block)
                else "returns numbers or objects with its tensors"
            )
            yield (
                f"{self._block(block)} reads values that only its own stage has"
                f"{in_brackets(line)}, and {what}, which other stages would have to make up; let "
                f"it return only tensors, including all values that are used after it"
            )

    def _own_backwards(self) -> Iterator[str]:
        """Refuse backwards that would end at a cut, where the graph of another stage begins.

        For example::

        stage 0   embedding, block 0 |
        stage 1                      | block 1, loss, torch.autograd.grad(loss, x)
                                     ^ ends here without an error
        """
        crossed = any(
            self._stage_of[block] != self._stage_of[block + 1]
            for block in self._record.backwards.reached
        )
        lines = [
            started.line
            for started in self._record.backwards.between
            if crossed
            or any(
                self._stage_of.get(goal) != self._stage_of[started.segment]
                for goal in started.goals
            )
        ]
        for line in lines or ([""] if crossed else []):
            yield (
                f"the step starts a backward of its own{in_brackets(line)}, which would end at the "
                f"beginning of its stage, since the rest of the graph is on other stages; "
                f"differentiate inside of a block, or with respect to values of the same stage, or "
                f"train with one stage"
            )

    def _hooked_spans(self) -> Iterator[str]:
        for span in self._record.hooks.spans:
            first, last = self._stage_of[span.first], self._stage_of[span.last]
            if first != last:
                yield (
                    f"a backward hook is registered on {span.name}, which begins on stage {first} "
                    f"and returns on stage {last}: it needs the gradients of inputs and outputs, "
                    f"and no stage has both; register it on blocks or on layers outside of them, "
                    f"or register a hook on a tensor"
                )

    def _carried_values(self) -> Iterator[str]:
        for carried in self._record.carried_values:
            source, used = self._stage_of[carried.made_in], self._stage_of[carried.used_in]
            obstacle = self._obstacle(carried)
            if source != used and obstacle:
                yield (
                    f"stage {used} ({self._describe_stage(used)}) needs what stage {source} "
                    f"({self._describe_stage(source)}) has computed from "
                    f"{_origins(carried.origins)}{in_brackets(carried.line)}, {obstacle}"
                )

    def _obstacle(self, carried: CarriedValue) -> str:
        """Return why a value cannot be sent, and a remedy; "" if it can be sent."""
        blocks = [self._chain.enclosing_block(origin) for origin in carried.origins]
        if any(block is not None and block > carried.made_in for block in blocks):
            return (
                "but that stage does not have all of these weights; compute a penalty on weights "
                "after the blocks, or use the optimizer's weight_decay"
            )
        if carried.port is None:
            return (
                "but no torch function returned it, so it cannot be traced; let the block return "
                "it with its output, or compute it with torch's functions"
            )
        return ""

    def _aliases(self) -> Iterator[str]:
        for alias in self._record.writes.aliases:
            source, written = self._stage_of[alias.made_in], self._stage_of[alias.written_in]
            if source != written:
                yield (
                    f"stage {written} ({self._describe_stage(written)}) writes in place into what "
                    f"it gets from stage {source} under another name, computed from "
                    f"{_origins(alias.origins)}, and it is read{in_brackets(alias.line)} after "
                    f"that; each name is sent on its own, so the write would not be seen: compute "
                    f"a new tensor instead (x = x + y for x += y)"
                )

    def _argument_writes(self) -> Iterator[str]:
        for write in self._record.writes.arguments:
            if write.block < self._last_start:
                yield describe_argument_write(write, self._chain)

    def _block(self, index: int) -> str:
        return self._chain.block_name(index)

    def _describe_stage(self, stage: int) -> str:
        blocks = self._stages[stage].blocks
        if not blocks:
            return "the code after the blocks"
        first, last = self._block(blocks[0]), self._block(blocks[-1])
        return first if first == last else f"{first} to {last}"


def describe_argument_write(write: ArgumentWrite, chain: BlockChain) -> str:
    """Return the refusal of a block that writes into its arguments."""
    return (
        f"{chain.block_name(write.block)} writes into the tensor that is its argument "
        f"{write.argument}{in_brackets(write.line)}, which only the block's own stage would see: "
        f"let the block return such values with its output"
    )


def _origins(origins: frozenset[str]) -> str:
    return describe_origins(origins).removeprefix("something computed from ")


def check_shared_weights(weights: Sequence[SharedWeight]) -> None:
    """Refuse hooks on shared weights: each stage has only part of their gradient.

    Raises:
        ValueError: A hook is registered on such a weight.
    """
    for weight in weights:
        if has_hooks(weight.parameter):
            stages = " and ".join(map(str, weight.stages))
            raise ValueError(
                f"a hook is registered on {' = '.join(weight.names)}, a weight that stages "
                f"{stages} use: each stage would call it with only its part of the gradient; use "
                f"on_after_backward or on_before_optimizer_step, where the parts are summed"
            )
