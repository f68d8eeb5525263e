"""Attributes and metrics that steps write: on the ranks that ran the line, then on all (rule 4).

The last stage alone runs the end of a step, so ``self.outs`` fills there::

    global rank 0    self.outs.append(loss)    self.outs: 5 losses         sends them
    another rank     exits before that line    self.outs: a placeholder    receives them
                     | a batch                 | hooks of a batch          | hooks of an epoch's end

The trace of the step has seen what it writes where. Other writes, in a branch that the first
batches did not take, are noticed by global rank 0; other ranks learn of it after the first batch of
a kind of step, or when it is first sent.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_pipeoffload.lightning_names import PACKAGES
from lightning_pipeoffload.loop.hooks.late_writes import OF_LIGHTNING, LateWrites
from lightning_pipeoffload.loop.hooks.sent_values import (
    MOST_BYTES,
    RemoteOutputs,
    UnsendableError,
    VariableState,
    choose_sender,
    pack,
    unpack,
)
from lightning_pipeoffload.loop.hooks.users_hooks import users_hooks
from lightning_pipeoffload.metrics import SharedMetricsConnector
from lightning_pipeoffload.runtime import leaves_of
from lightning_pipeoffload.runtime.cut import StepRecord
from lightning_pipeoffload.runtime.run import Pipeline
from lightning_pipeoffload.runtime.shapes import ShapeOnly
from lightning_pipeoffload.runtime.step import Microbatch
from lightning_pipeoffload.runtime.users_code import (
    GONE,
    NamedAttribute,
    RemoteValue,
    StepPoint,
    refill,
)

_REFILLED = (list, dict, set, deque)


class CollectedValues:
    """Attributes and metrics that the steps of a module write, over the ranks of a pipeline."""

    def __init__(
        self,
        module: pl.LightningModule,
        pipeline: Pipeline,
        connector: SharedMetricsConnector,
    ) -> None:
        self._module = module
        self._pipeline = pipeline
        self._group = group = pipeline.group
        self._connector = connector
        self._variables: dict[str, NamedAttribute] = {}
        self._late: dict[str, str] = {}  # not in any trace: the kind of step that writes it
        self._due: set[str] = set()
        self._lacking: dict[str, str] = {}  # with the error of its use
        self._hidden_metrics: dict[int, str] = {}
        self._places: dict[int, dict[str, StepPoint]] = {}  # by id of a record, while it lives
        self._kind = ""
        self._records: list[StepRecord] = []  # of the step's microbatches
        self._warned: set[str] = set()
        self._logged: list[str] = []
        self._found_metrics: tuple[list[int], list[tuple[str, Metric]]] = [], []
        # Global rank 0 runs the step to its end, and so every line that writes.
        self._late_writes = (
            LateWrites(module, self._variables, self._metrics, self._record_write)
            if group.is_root
            else None
        )
        self._exchanged_kinds = {""}
        self._has_trained = False  # since values were sent before a step
        self._takes_outputs: dict[str, bool] = {}
        for path, part in module.named_modules():  # placeholders that an earlier run has left
            for name, value in vars(part).items():
                if isinstance(value, RemoteValue):
                    label = self._add(NamedAttribute(path, part, name))
                    self._lacking[label] = value.message

    @contextmanager
    def in_step(self, kind: str) -> Iterator[None]:
        """Give a step this rank's own values, and the hooks after it placeholders.

        ``kind`` is the name of the step; "" for remaining actions of earlier steps.
        """
        self._kind, self._records = kind, []
        self._has_trained |= kind == "training_step"
        self._begin_step()
        try:
            yield
        except BaseException:
            self._install_placeholders()
            raise
        self._end_step()
        if kind not in self._exchanged_kinds:  # once, in the first batch
            self._exchanged_kinds.add(kind)
            mine = [label for label, late in self._late.items() if late == kind]
            for labels in self._group.gather(mine):
                self._late.update(dict.fromkeys(labels, kind))
            self._end_step()

    def set_step_records(self, microbatches: Iterable[Microbatch]) -> None:
        """Record the microbatches of the step, by whose records it writes."""
        self._records = [*{id(each.record): each.record for each in microbatches}.values()]

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Give placeholders to hooks that run in the middle of a plan."""
        self._end_step()
        try:
            yield
        finally:
            self._begin_step()

    def _begin_step(self) -> None:
        self._restore_local_values()
        if self._late_writes is not None and self._kind:
            self._late_writes.begin()

    def _end_step(self) -> None:
        if self._late_writes is not None and self._kind:
            self._written_in_batch()  # adds it to the variables
            self._late_writes.end()
        for label, place in self._written_in_batch().items():
            self._due.add(label)
            if self._runs_on_this_rank(place):
                self._lacking.pop(label, None)
            else:
                self._lacking[label] = self._message(label, place)
        self._install_placeholders()

    def _restore_local_values(self) -> None:
        self._hidden_metrics.clear()
        for label in self._lacking:
            variable = self._current_variable(label)
            if isinstance(variable.value, RemoteValue):
                variable.put(variable.value.local_value)

    def _install_placeholders(self) -> None:
        for label, message in self._lacking.items():
            variable = self._current_variable(label)
            owner, value = variable.part, variable.value
            if isinstance(owner, Metric):  # whose attributes torchmetrics reads at any time
                self._hidden_metrics[id(owner)] = message
                owner._computed = None  # private: else compute() returns it without a question
            elif not isinstance(owner, MetricCollection) and not isinstance(value, RemoteValue):
                variable.put(RemoteValue(message, value))

    def refuse_metric(self, metric: Metric) -> None:
        """Raise ``RuntimeError`` if only another rank has the values of the metric."""
        if id(metric) in self._hidden_metrics:
            raise RuntimeError(self._hidden_metrics[id(metric)])

    def _message(self, label: str, point: StepPoint) -> str:
        segment = point.segment if point.is_in_block else len(self._pipeline.chain)
        stage = next(s.index for s in self._pipeline.cut.stages if segment in s.segments)
        rank = self._group.global_ranks[self._group.stage_ranks[stage]]
        return (
            f"{label} is not on global rank {self._group.global_rank} between batches: the step "
            f"writes it on global rank {rank}. Use self.log in the step and "
            f"trainer.callback_metrics here, or {label} in a hook of the epoch's end "
            f"(on_train_epoch_end, on_validation_epoch_end), where all ranks have it"
        )

    # Which variables

    def _add(self, variable: NamedAttribute) -> str:
        self._variables.setdefault(variable.label, variable)
        return variable.label

    def _current_variable(self, label: str) -> NamedAttribute:
        """Return a variable of the present submodule: a hook may replace a metric."""
        if label in self._variables:
            path, name = self._variables[label].path, self._variables[label].name
        else:
            path, _, name = label.removeprefix("self.").rpartition(".")
        self._variables[label] = NamedAttribute(path, self._module.get_submodule(path), name)
        return self._variables[label]

    def _written_in_batch(self) -> dict[str, StepPoint]:
        at_end = StepPoint(len(self._pipeline.chain), is_in_block=False)
        points = {label: at_end for label, kind in self._late.items() if kind == self._kind}
        for record in self._records if self._kind else ():
            if id(record) not in self._places:
                self._places[id(record)] = dict(self._written_in(record))
                dropping = weakref.finalize(record, self._places.pop, id(record), None)
                dropping.atexit = False
            points |= self._places[id(record)]
        return points

    def _written_in(self, record: StepRecord) -> Iterator[tuple[str, StepPoint]]:
        for write in record.writes.attributes:
            if _is_sent(write.variable):
                yield self._add(write.variable), write.point

    def _runs_on_this_rank(self, point: StepPoint) -> bool:
        if point.is_in_block:
            return any(point.segment in each for each in self._segments)
        return point.segment <= self._last_segment

    @property
    def _segments(self) -> list[frozenset[int]]:
        """The segments of the step that each stage of this rank runs; all before it is cut."""
        if not self._pipeline.stages:
            return [frozenset(range(len(self._pipeline.chain) + 1))]
        return [self._pipeline.cut.stages[s].segments for s in self._pipeline.tensors.local_stages]

    @property
    def _last_segment(self) -> int:
        return max(self._segments[-1])

    def _metrics(self) -> list[tuple[str, Metric]]:
        key = [*map(id, self._module._modules.values())]  # private: hooks may make metrics
        if self._found_metrics[0] != key:
            parts = self._module.named_modules()
            self._found_metrics = key, [(path, p) for path, p in parts if isinstance(p, Metric)]
        return self._found_metrics[1]

    def _record_write(self, label: str) -> None:
        """Record that the running step writes a variable."""
        owner = self._current_variable(label).part
        names = (*owner.metric_state, "_computed") if isinstance(owner, Metric) else ()
        path = label.rpartition(".")[0]
        for written in (label, *(f"{path}.{name}" for name in names)):
            self._variables[written] = self._current_variable(written)
            self._late[written] = self._kind

    # Sending

    def send(self) -> None:
        """Send what steps have written since the last call to all ranks; all ranks call it."""
        mine = {label: self._variable_state(label) for label in sorted(self._due)}
        self._due.clear()
        gathered = self._group.gather((mine, self._logged_objects()))
        self._logged = gathered[self._group.stage_ranks[-1]][1]
        states: dict[str, dict[int, VariableState]] = {}
        for rank, (reports, _) in enumerate(gathered):
            for label, report in reports.items():
                states.setdefault(label, {})[rank] = report
                if report.kind:
                    self._late[label] = report.kind
        self._restore_local_values()
        senders: dict[int, list[str]] = {}
        for label, reported in states.items():
            senders.setdefault(choose_sender(reported), []).append(label)
        for label in senders.pop(-1, ()):
            self._mark_unsendable(label, "each of several stages has some of it")
        for rank, labels in sorted(senders.items()):
            self._send_from(rank, labels)
        self._install_placeholders()

    def send_training_writes(self) -> None:
        """Send what training steps have written before a step runs whole; all ranks call it."""
        if self._has_trained:
            self._has_trained = False
            self.send()
            self._restore_local_values()

    def _variable_state(self, label: str) -> VariableState:
        end = None if label in self._lacking else self._last_segment
        leaves = [] if end is None else list(leaves_of(self._current_variable(label).value))
        is_whole = not any(isinstance(leaf, ShapeOnly) for leaf in leaves)
        return VariableState(end, len(leaves), is_whole, self._late.get(label, ""))

    def _send_from(self, rank: int, labels: Sequence[str]) -> None:
        is_mine = rank == self._group.rank
        packed = self._pack(labels) if is_mine else None
        packed = self._group.broadcast(packed, self._group.global_ranks[rank])
        for label, data in packed.items():
            if isinstance(data, str):
                self._mark_unsendable(label, data, is_mine)
            else:
                self._lacking.pop(label, None)
                if not is_mine:
                    self._receive(label, data)

    def _pack(self, labels: Sequence[str]) -> dict[str, bytes | str | None]:
        packed: dict[str, bytes | str | None] = {}
        room = MOST_BYTES
        for label in labels:
            value = self._current_variable(label).value
            try:
                data = None if value is GONE else pack(value, room)
            except UnsendableError as error:
                packed[label] = str(error)
            else:
                packed[label] = data
                room -= len(data or b"")
        return packed

    def _receive(self, label: str, data: bytes | None) -> None:
        variable = self._current_variable(label)
        value = GONE if data is None else unpack(data, self._group.device)
        container = variable.value
        if type(container) is type(value) and isinstance(container, _REFILLED):
            refill(container, value)  # other objects may hold it too
            value = container
        variable.put(value)

    def _mark_unsendable(self, label: str, reason: str, has_it: bool = False) -> None:
        message = (
            f"{label}, which the step writes, is not sent to all ranks, for {reason}; use self.log "
            f"in the step and trainer.callback_metrics in hooks"
        )
        if not has_it:
            self._lacking[label] = message
        if label not in self._warned:
            self._warned.add(label)
            rank_zero_warn(f"{message}. A hook that uses it on a rank without it raises an error.")

    def _logged_objects(self) -> list[str]:
        results = self._module.trainer._results  # private: what is logged in this loop
        if not self._group.is_root or results is None:
            return []
        objects = {id(item.value) for item in results.values() if not item.is_tensor}
        return [path for path, metric in self._metrics() if id(metric) in objects]

    def reset_logged(self) -> None:
        """Reset logged metrics when Lightning does on global rank 0."""
        for path in self._logged:
            metric = self._module.get_submodule(path)
            if isinstance(metric, Metric):
                metric.reset()
        self._logged = []

    def outputs(self, kind: str, value: Any) -> Any:
        """Return the output of an evaluation's step, on all ranks if a hook takes it.

        ``value`` is the output on global rank 0, and None elsewhere.
        """
        if kind not in self._takes_outputs:
            hook = f"on_{kind.removesuffix('_step')}_batch_end"
            self._takes_outputs[kind] = bool(users_hooks(self._module.trainer, (hook,)))
        if not self._takes_outputs[kind]:
            return value
        packed: Any = None
        if self._group.is_root:
            try:
                packed = pack(value)
            except UnsendableError as error:
                packed = str(error)
        packed = self._group.broadcast(packed, self._group.root)
        if self._group.is_root:
            return value
        if isinstance(packed, str):
            return RemoteOutputs(kind, self._group.root, self._connector.outputs)
        return unpack(packed, self._group.device)


def _is_sent(variable: NamedAttribute) -> bool:
    if isinstance(variable.part, pl.LightningModule) and variable.name in OF_LIGHTNING:
        return False
    if isinstance(variable.part, Metric):
        return variable.name in (*variable.part.metric_state, "_update_count", "_computed")
    library = type(variable.part).__module__.partition(".")[0]
    if library == "torch":  # weights that old spectral_norm and weight_norm compute
        return isinstance(variable.value, Tensor)
    return library not in PACKAGES
