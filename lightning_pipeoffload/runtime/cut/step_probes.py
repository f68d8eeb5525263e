"""What the user's steps do, looked at once for each kind of step and shape of its microbatch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.cut.probe import find_sizes, probe_step, repeat_step
from lightning_pipeoffload.runtime.cut.probe_result import ImaginedError, Probe
from lightning_pipeoffload.runtime.cut.value_log import ValueLog, first_difference
from lightning_pipeoffload.runtime.microbatch import shape_signature
from lightning_pipeoffload.runtime.randomness import has_drawn_since, mix_seed, seed_all
from lightning_pipeoffload.runtime.shapes.imagined_values import EVERYTHING, NO_ALARM, Imagined
from lightning_pipeoffload.runtime.users_code.attribute_uses import AttributeUses
from lightning_pipeoffload.runtime.users_code.batch_writes import Trial
from lightning_pipeoffload.runtime.users_code.draw_lines import tracing_lines
from lightning_pipeoffload.runtime.users_code.namespaces import REGISTRIES, Namespace
from lightning_pipeoffload.runtime.users_code.random_sources import Place, Source
from lightning_pipeoffload.runtime.users_code.step_call import PROBE, UsersStep
from lightning_pipeoffload.runtime.users_code.users_lines import in_brackets
from lightning_pipeoffload.runtime.users_code.written_state import Variable

_MOST_PROBES = 64


class StepProbes:
    """The probes of one module's steps, of which the last few are kept.

    Args:
        module: The user's module.
        chain: Its blocks.
        device: The device of the microbatches.
        is_cut: Whether there are several stages, which have to compute alike.
        before_look: Called before a step is run to look at it.

    Attributes:
        known: Probes by kind of step, mode of the module and shapes, and by sizes that depend on
            the values of the microbatch.
        always_trained: Names of the parameters that get a gradient in each training step that was
            looked at.
    """

    def __init__(
        self,
        module: nn.Module,
        chain: BlockChain,
        device: torch.device,
        is_cut: bool,
        before_look: Callable[[], None] = lambda: None,
    ) -> None:
        self._module = module
        self._chain = chain
        self._device = device
        self._is_cut = is_cut
        self._before_look = before_look
        self._compared: set[Any] = set()
        self._sized_in: dict[Any, int] = {}
        self._written: dict[tuple[Any, str], Variable] = {}
        self.known: OrderedDict[Any, Probe] = OrderedDict()
        self._first_of_training: Probe | None = None
        self.always_trained: set[str] = set()

    @property
    def written(self) -> list[Variable]:
        """What steps write to keep."""
        return list(self._written.values())

    def find(
        self,
        kind: str,
        part: Any,
        step: UsersStep,
        learn: Callable[[Probe], None],
        seed: int = 0,
    ) -> Probe:
        """Return what a step does with a microbatch.

        Args:
            kind: The kind of the step.
            part: The microbatch.
            step: The user's step.
            learn: A function that is called with a probe that is new.
            seed: The seed of what the step draws before its blocks.
        """
        key = kind, self._module.training, shape_signature(part)
        if key in self._sized_in or (key, ()) not in self.known:
            self._before_look()
        seeded = _Seeded(step, mix_seed(seed, 0))
        trial = Trial(seeded, part)
        sizes = self._find_sizes(key, trial)
        if (key, sizes) in self.known:
            self.known.move_to_end((key, sizes))
            return self.known[key, sizes]
        probe = self._probe(trial, is_first=key[:2] not in self._compared)
        if self._is_cut and probe.sized_in is not None and key not in self._sized_in:
            self._sized_in[key] = probe.sized_in
            sizes = self._find_sizes(key, trial)
        self.known[key, sizes] = probe
        probe.changes_batch = trial.has_changed
        probe.flow.draws_beside_torch = seeded.draws_beside_torch
        self._compared.add(key[:2])
        if len(self.known) > _MOST_PROBES:
            self.known.popitem(last=False)
        if torch.is_grad_enabled():
            self._note_training(probe)
        learn(probe)
        return probe

    def _find_sizes(self, key: Any, call: Callable[[], Any]) -> tuple[Any, ...]:
        """Return the sizes that depend on the values of a microbatch, if any do."""
        if key not in self._sized_in:
            return ()
        block = self._sized_in[key]
        return find_sizes(self._module, self._chain, call, self._device, block)

    def _note_training(self, probe: Probe) -> None:
        trained = probe.trained or set()
        if self._first_of_training is None:
            self._first_of_training = probe
            self.always_trained = set(trained)
        else:
            self.always_trained &= trained

    def always_train(self, names: Set[str]) -> bool:
        """Whether every training step gives a parameter of these names a gradient."""
        return not self.always_trained.isdisjoint(names)

    def _probe(self, call: Callable[[], Any], is_first: bool) -> Probe:
        log, way = ValueLog(), EVERYTHING
        try:
            probe = self._run(call, log if is_first and self._is_cut else None)
        except ImaginedError as error:
            # A flag that is up may be an alarm, at which a step raises.
            log, way = ValueLog(), NO_ALARM
            try:
                probe = self._run(call, log if is_first and self._is_cut else None, way)
            except ImaginedError:
                raise self._explain(error) from error.cause
        if not self._is_cut:
            return probe
        run = partial(self._run, way=way)
        if probe.made:
            with _having(probe.made):
                probe.draws.update(run(call).draws)
        if any(len(draws) > 1 for draws in probe.draws.values()):
            probe.lines = self._find_lines(call, run, probe)
        again = ValueLog() if is_first else None
        if self._know_written((*probe.assigned, *self._in_place(probe))):
            uses = AttributeUses(self._module, self._chain.blocks, self._written.values())
            run(call, log=again, uses=uses)
            probe.uses = uses.found
        elif is_first:
            again = self._repeat(call, way)
        if again is not None and first_difference(log, again):
            # What only the first run makes is a cache.
            probe.unrepeatable = first_difference(again, self._repeat(call, way))
        return probe

    def _explain(self, error: ImaginedError) -> Exception:
        if not error.is_in_block:
            return error.cause
        block, line = list(error.found.imagined.items())[-1]
        return ValueError(
            f"{self._chain.block_name(block)} asks for values{in_brackets(line)} that only the "
            f"stage has that runs it; its shapes are found as if every search found everything, "
            f"and then it fails ({type(error.cause).__name__}: {error.cause}); let the block take "
            f"any number of rows, or compute what it asks for from the batch"
        )

    def _in_place(self, probe: Probe) -> Iterator[Variable]:
        paths = {part: path for path, part in self._module.named_modules()}
        for part, name in probe.written_in_place:
            if name not in REGISTRIES:
                is_buffer = name in part._buffers
                yield Variable(Namespace.of_part(paths[part], part, is_buffer), name)

    def _know_written(self, variables: Iterable[Variable]) -> bool:
        """Add what a step writes to what steps write; return whether that is anything."""
        found = {(v.namespace.key, v.name): v for v in variables}
        if found.keys() - self._written.keys():
            self._written.update(found)
            self.known.clear()  # other steps may read it
        return bool(self._written)

    def _find_lines(
        self, call: Callable[[], Any], run: Callable[[Callable[[], Any]], Probe], probe: Probe
    ) -> dict[Source, list[str]]:
        lines: dict[Source, list[str]] = {}

        def traced() -> Any:
            with tracing_lines(probe.draws) as found:
                lines.update(found)  # the lists, which are filled
                return call()

        with _having(probe.made):
            run(traced)
        return lines

    def _repeat(self, call: Callable[[], Any], way: Imagined) -> ValueLog:
        """Run the step again from the same state."""
        return repeat_step(self._module, self._chain, call, self._device, way)

    def _run(
        self,
        call: Callable[[], Any],
        log: ValueLog | None = None,
        way: Imagined = EVERYTHING,
        uses: AttributeUses | None = None,
    ) -> Probe:
        return probe_step(self._module, self._chain, call, self._device, log, way, uses)

    def forget(self) -> None:
        """Look anew: what blocks hand on may need a gradient now, or none."""
        self.known.clear()
        self._first_of_training = None

    def weight_flops(self, segments: Iterable[int]) -> int:
        """Return the operations of the weight gradients of the first training microbatch.

        Args:
            segments: The segments of the step that count.
        """
        probe = self._first_of_training
        return sum(probe.weight_flops[segment] for segment in segments) if probe is not None else 0


class _Seeded:
    """Runs a step so that it draws before its blocks what it will: sizes may depend on it."""

    def __init__(self, step: UsersStep, seed: int) -> None:
        self._step = step
        self._seed = seed
        self.draws_beside_torch = False

    def __call__(self, part: Any) -> Any:
        seed_all(self._seed)
        try:
            return self._step(part, PROBE)
        finally:
            self.draws_beside_torch |= has_drawn_since(self._seed)


@contextmanager
def _having(made: Iterable[tuple[Place, Any]]) -> Iterator[None]:
    """Let what a step has made, and would make once, be there already."""
    before = [(place, place.exists(), place.find()) for place, _ in made]
    for place, value in made:
        place.put(value)
    try:
        yield
    finally:
        for place, existed, value in before:
            if existed:
                place.put(value)
            else:
                place.remove()
