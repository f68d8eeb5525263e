"""Refuses steps that cannot be cut where the module is: what is wrong, where, and what would do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.cut.crossings import Crossing
from lightning_pipeoffload.runtime.cut.ownership import SharedWeight
from lightning_pipeoffload.runtime.cut.partition import Stage
from lightning_pipeoffload.runtime.cut.record import StepRecord
from lightning_pipeoffload.runtime.shapes.step_rules import describe_origins
from lightning_pipeoffload.runtime.users_code.users_lines import in_brackets
from lightning_pipeoffload.runtime.weight_grad.queue import has_hooks


def loss_in(result: Any) -> Tensor:
    """Find the loss in what a training step returned, as Lightning does.

    Raises:
        ValueError: There is no loss in it.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        returned = "None" if result is None else type(result).__name__
        raise ValueError(
            f"the training step returned {returned} without a loss; a pipeline cannot skip a "
            f"batch, whose backward the other stages wait for: call the blocks all the same, and "
            f"return a loss times 0"
        )
    return loss


def check_step(
    record: StepRecord,
    chain: BlockChain,
    stages: Sequence[Stage],
    owners_of: Callable[[str], frozenset[int]],
) -> None:
    """Refuse a step that cannot be cut between these stages.

    Raises:
        ValueError: It cannot; the message names the user's line, and says what would do.
    """
    stage_of = {segment: stage.index for stage in stages for segment in stage.segments}
    _check_weight_writes(record, chain, stage_of, owners_of)
    _check_repeatable(record, stages)
    _check_brief_hooks(record, chain)
    _check_imagined(record, chain, stages)
    _check_own_backwards(record, stage_of)
    _check_hooked_spans(record, stage_of)
    _check_crossings(record, chain, stages, stage_of)
    _check_aliases(record, chain, stages, stage_of)


def _check_weight_writes(
    record: StepRecord,
    chain: BlockChain,
    stage_of: Mapping[int, int],
    owners_of: Callable[[str], frozenset[int]],
) -> None:
    for name, segment, line in record.weight_writes:
        elsewhere = owners_of(name) - {stage_of[segment]}
        if elsewhere:
            behind = len(chain) if segment < len(chain) else 0
            place = f"before {chain.block_name(segment)}" if behind else "behind the blocks"
            raise ValueError(
                f"the step writes {name} {place}{in_brackets(line)}, on stage {stage_of[segment]}, "
                f"but stage {min(elsewhere)} has this weight too and would not see it; write it "
                f"between batches, in on_train_batch_start() say, or where only the stage that "
                f"computes with it comes"
            )


def _check_repeatable(record: StepRecord, stages: Sequence[Stage]) -> None:
    entry = record.unrepeatable
    if entry is not None and entry.segment < stages[-1].blocks.start:
        raise ValueError(
            f"{entry.name}(){in_brackets(entry.line)} gives another value each time that the step "
            f"runs from the same state, so each stage would have its own; keep what it depends on "
            f"in an attribute of the module, draw it from torch's, numpy's or Python's global "
            f"generator or from a generator that is an attribute of the module, or let the batch "
            f"bring it"
        )


def _check_brief_hooks(record: StepRecord, chain: BlockChain) -> None:
    for block in sorted(record.opened & record.briefly_hooked):
        raise ValueError(
            f"the step uses what a hook on {chain.block_name(block)} has kept, and registers and "
            f"removes that hook itself, but only the last stage comes to where it is removed; "
            f"register it once, in __init__ or in setup()"
        )


def _check_imagined(record: StepRecord, chain: BlockChain, stages: Sequence[Stage]) -> None:
    for index, line in record.imagined.items():
        is_template = record.outputs[index].is_template
        if index >= stages[-1].blocks.start or (is_template and index not in record.opened):
            continue
        what = (
            "keeps in an attribute, or gives to a hook, what is used behind it"
            if is_template
            else "returns numbers or objects beside its tensors"
        )
        raise ValueError(
            f"{chain.block_name(index)} asks for values that only the stage has that runs it"
            f"{in_brackets(line)}, and {what}, which other stages would have to make up; let it "
            f"return tensors alone, all that is used behind it among them"
        )


def _check_own_backwards(record: StepRecord, stage_of: Mapping[int, int]) -> None:
    found = record.own_backwards
    leads_back = [block for block in found.crossed if stage_of[block] != stage_of[block + 1]]
    for started in found.started:
        stage = stage_of[started.segment]
        if leads_back or any(stage_of.get(goal) != stage for goal in started.goals):
            raise ValueError(_own_backward(started.line))
    if leads_back:
        raise ValueError(_own_backward(""))


def _own_backward(line: str) -> str:
    return (
        f"the step starts a backward of its own{in_brackets(line)}, which would end where its "
        f"stage begins, for the rest of the graph is on other stages; differentiate inside of a "
        f"block, or with respect to what the same stage has computed, or train with one stage"
    )


def _check_hooked_spans(record: StepRecord, stage_of: Mapping[int, int]) -> None:
    for span in record.hooked_spans:
        first, last = stage_of[span.first], stage_of[span.last]
        if first != last:
            raise ValueError(
                f"a backward hook is registered on {span.name}, which stage {first} calls and "
                f"stage {last} returns from: it needs the gradients of both ends, and no stage has "
                f"them; register it on the blocks or on layers beside them, or a hook on a tensor "
                f"at one end"
            )


def _check_crossings(
    record: StepRecord, chain: BlockChain, stages: Sequence[Stage], stage_of: Mapping[int, int]
) -> None:
    for crossing in record.crossings:
        made, used = stage_of[crossing.made_in], stage_of[crossing.used_in]
        obstacle = _obstacle(chain, crossing)
        if made != used and obstacle:
            raise ValueError(
                f"stage {used} ({_span(chain, stages[used])}) needs what stage {made} "
                f"({_span(chain, stages[made])}) has computed from "
                f"{_origins(crossing.origins)}{in_brackets(crossing.line)}, {obstacle}"
            )


def _check_aliases(
    record: StepRecord, chain: BlockChain, stages: Sequence[Stage], stage_of: Mapping[int, int]
) -> None:
    for alias in record.aliases:
        made, written = stage_of[alias.made_in], stage_of[alias.written_in]
        if made != written:
            raise ValueError(
                f"stage {written} ({_span(chain, stages[written])}) writes in place into what it "
                f"gets from stage {made} under another name, computed from "
                f"{_origins(alias.origins)}, and it is read{in_brackets(alias.line)} after that; "
                f"each name is sent on its own, so the write would not be seen: compute a new "
                f"tensor instead (x = x + y for x += y)"
            )


def _origins(origins: frozenset[str]) -> str:
    return describe_origins(origins).removeprefix("something computed from ")


def _span(chain: BlockChain, stage: Stage) -> str:
    first, last = chain.block_name(stage.blocks[0]), chain.block_name(stage.blocks[-1])
    return first if first == last else f"{first} to {last}"


def _obstacle(chain: BlockChain, crossing: Crossing) -> str:
    """Say why a value cannot be sent, and what would help; "" if it can."""
    blocks = [chain.index_of(origin) for origin in crossing.origins]
    if any(block is not None and block > crossing.made_in for block in blocks):
        return (
            "but that stage has not all of these weights; compute a penalty on weights behind the "
            "blocks, or as the optimizer's weight_decay"
        )
    if crossing.port is None:
        return (
            "but no call of a torch function returned it, so it cannot be followed; let the block "
            "return it beside its output, or compute it with torch's functions"
        )
    return ""


def check_shared_weights(weights: Sequence[SharedWeight]) -> None:
    """Check that nothing looks at gradients of which each stage has a part.

    Raises:
        ValueError: A hook is registered on such a weight.
    """
    for weight in weights:
        if has_hooks(weight.parameter):
            stages = " and ".join(map(str, weight.stages))
            raise ValueError(
                f"a hook is registered on {' = '.join(weight.names)}, a weight that stages "
                f"{stages} use: each of them has a part of its gradient only, and would call the "
                f"hook with that; do it in on_after_backward or on_before_optimizer_step, where "
                f"the parts are summed"
            )
