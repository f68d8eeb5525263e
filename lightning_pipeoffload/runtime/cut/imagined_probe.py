"""Two probes of a step whose blocks ask for values: what is the same in both holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.cut.crossings import Crossing, Flow
from lightning_pipeoffload.runtime.cut.probe_result import ImaginedError, Probe
from lightning_pipeoffload.runtime.payload import BlockOutput, TensorSpec
from lightning_pipeoffload.runtime.shapes.imagined_values import (
    EVERYTHING,
    NO_ALARM,
    NOTHING,
    Imagined,
)
from lightning_pipeoffload.runtime.users_code.users_lines import in_brackets


def look_both_ways(look: Callable[[Imagined], Probe], chain: BlockChain) -> tuple[Probe, Imagined]:
    """Probe a step, twice if its blocks ask for values; where one way goes wrong, the other holds.

    One way alone may go wrong: a flag may be an alarm, and a step raises where it is up.

    Args:
        look: A function that probes the step, with values made up in a way.
        chain: Its blocks.

    Returns:
        What was seen, and a way that does not go wrong.

    Raises:
        ValueError: What a block hands on depends on these values, or both ways go wrong.
    """
    everything, way = _look(look, EVERYTHING), EVERYTHING
    if isinstance(everything, Probe) and not everything.imagined:
        return everything, way
    if isinstance(everything, ImaginedError):
        everything, way = _look(look, NO_ALARM), NO_ALARM
    nothing = _look(look, NOTHING)
    _compare_outputs(_seen(everything), _seen(nothing), chain)
    if isinstance(everything, ImaginedError):
        if isinstance(nothing, ImaginedError):
            raise _explain(everything, chain)
        return nothing, NOTHING
    if isinstance(nothing, Probe):
        _unite(everything, nothing)
    return everything, way


def _look(look: Callable[[Imagined], Probe], way: Imagined) -> Probe | ImaginedError:
    try:
        return look(way)
    except ImaginedError as error:
        return error


def _seen(found: Probe | ImaginedError) -> Probe:
    return found.found if isinstance(found, ImaginedError) else found


def _explain(error: ImaginedError, chain: BlockChain) -> Exception:
    cause = error.cause
    if not error.is_in_block:
        return cause
    block, line = list(error.found.imagined.items())[-1]
    return ValueError(
        f"{chain.block_name(block)} asks for values{in_brackets(line)} that only the stage has "
        f"that runs it; to see its shapes they are made up, so that everything is found, or "
        f"nothing, and both go wrong ({type(cause).__name__}: {cause}); let the block take any "
        f"number of rows, or compute what it asks for from the batch"
    )


def _compare_outputs(one: Probe, other: Probe, chain: BlockChain) -> None:
    for index, outputs in enumerate(zip(one.flow.outputs, other.flow.outputs, strict=False)):
        shapes = [_shapes_of(output) for output in outputs]
        if shapes[0] != shapes[1]:
            asking = max(b for b in {**one.imagined, **other.imagined} if b <= index)
            line = one.imagined.get(asking) or other.imagined[asking]
            raise ValueError(
                f"what {chain.block_name(index)} hands on depends on values that only the stage "
                f"has that runs it{in_brackets(line)}: {_describe(outputs[0])} or "
                f"{_describe(outputs[1])}; the next stage has to know the shapes before, so let "
                f"the block keep its shapes (pad, or weigh by 0 what is left out), or choose by "
                f"the batch's own values before the blocks"
            )


def _shapes_of(output: BlockOutput) -> Any:
    return output.treespec, [(spec.shape, spec.dtype) for spec in output.payload]


def _describe(output: BlockOutput) -> str:
    return " and ".join(f"{list(s.shape)}" for s in output.payload) or "no tensor"


def _unite(into: Probe, other: Probe) -> None:
    """Take in what the other way has shown.

    A gradient counts as coming back that comes back in one of them: B checks that it does.
    """
    for name, segments in other.segments.items():
        into.segments[name] |= segments
    for block, line in other.imagined.items():
        into.imagined.setdefault(block, line)
    into.forward_flops = list(map(max, into.forward_flops, other.forward_flops))
    into.weight_flops = list(map(max, into.weight_flops, other.weight_flops))
    into.training_flops = max(into.training_flops, other.training_flops)
    into.written |= other.written
    into.written_in_place |= other.written_in_place
    into.saved_and_written |= other.saved_and_written
    into.weight_writes += [w for w in other.weight_writes if w not in into.weight_writes]
    into.aliases += [a for a in other.aliases if a not in into.aliases]
    into.assigned += [v for v in other.assigned if v not in into.assigned]
    into.briefly_hooked |= other.briefly_hooked
    for source, draws in other.draws.items():
        into.draws.setdefault(source, set()).update(draws)
    known = into.trained is not None and other.trained is not None
    into.trained = into.trained & other.trained if known else None  # type: ignore[operator]
    into.own_backwards.crossed |= other.own_backwards.crossed
    into.own_backwards.started += other.own_backwards.started
    into.flow = _unite_flows(into.flow, other.flow)


def _unite_flows(one: Flow, other: Flow) -> Flow:
    outputs = list(map(_unite_outputs, one.outputs, other.outputs))
    crossings = {_key_of(crossing): crossing for crossing in one.crossings}
    for crossing in other.crossings:
        key = _key_of(crossing)
        known = crossings.get(key, crossing)
        crossings[key] = _unite_crossings(known, crossing)
    return Flow(
        outputs,
        list(crossings.values()),
        one.opened | other.opened,
        one.starts_backward or other.starts_backward,
        one.is_certain and other.is_certain,
    )


def _unite_outputs(one: BlockOutput, other: BlockOutput) -> BlockOutput:
    others = iter(other.payload)
    leaves = tuple(
        _unite_specs(leaf, next(others)) if isinstance(leaf, TensorSpec) else leaf
        for leaf in one.leaves
    )
    return replace(one, leaves=leaves)


def _unite_specs(one: TensorSpec, other: TensorSpec) -> TensorSpec:
    return replace(
        one,
        requires_grad=one.requires_grad or other.requires_grad,
        gets_gradient=one.gets_gradient or other.gets_gradient,
    )


def _key_of(crossing: Crossing) -> Any:
    return crossing.port or (crossing.made_in, crossing.line)


def _unite_crossings(one: Crossing, other: Crossing) -> Crossing:
    starts = [c.trains_from for c in (one, other) if c.trains_from is not None]
    is_known = one.led_back is not None and other.led_back is not None
    return replace(
        one,
        used_in=max(one.used_in, other.used_in),
        trains_from=min(starts, default=None),
        led_back=[*one.led_back, *other.led_back] if is_known else None,  # type: ignore[misc]
    )
