"""What the ranks of a pipeline compare with each batch, while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_pipeoffload.optimizers.step_options import StepOptions
from lightning_pipeoffload.processes.rank_differences import refuse_differences
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.microbatch import start_checksum
from lightning_pipeoffload.runtime.pipeline import Pipeline

_SET_ALIKE = (
    "set options of optimizers, freeze parameters and call optimizer.step alike on all ranks; a "
    "value that only some ranks have goes to all of them by self.log and "
    "trainer.callback_metrics, or by trainer.strategy.broadcast"
)


class _Seen(NamedTuple):
    """What a rank has at a batch.

    Attributes:
        what: What the batch is, in words; empty where there is none.
        checksum: A function that waits for the checksum of the batch.
        options: What decides on the optimizers' steps; None where nothing trains.
    """

    what: str = ""
    checksum: Callable[[], int] = int
    options: StepOptions | None = None


class BatchComparison:
    """A rank's batches and its optimizers' options, compared with the others'.

    On an accelerator each batch is compared with the next one, for then nobody waits for it.

    Args:
        pipeline: This rank's part of the module.
        group: The pipeline's processes.
        is_late: Whether the batches are on an accelerator.

    Attributes:
        options: A function that returns what decides on the optimizers' steps.
    """

    def __init__(self, pipeline: Pipeline, group: PipelineGroup, is_late: bool) -> None:
        self._pipeline = pipeline
        self._group = group
        self._is_late = is_late
        self._before = _Seen()
        self.options: Callable[[], StepOptions | None] = lambda: None

    def start(self, batch: Any, what: str, trains: bool) -> Callable[[], None]:
        """Start to compare a batch.

        Args:
            batch: Any pytree.
            what: What the batch is, in words, for an error.
            trains: Whether it is trained on.

        Returns:
            A function to call after the step, on all ranks, which needed all of them. It raises
            RuntimeError or ValueError where something differs.
        """
        options = self.options() if trains else None
        seen = _Seen(what, start_checksum(batch), options)
        if self._is_late:
            seen, self._before = self._before, seen
        return self._start(seen)

    def finish(self) -> None:
        """Compare the last batch, where that is left, and what the optimizers have now."""
        last, self._before = self._before, _Seen()
        self._start(last)()
        self._start(_Seen(options=self.options()))()

    def _start(self, seen: _Seen) -> Callable[[], None]:
        options = seen.options
        numbers = [0 if options is None else options.digest(), seen.checksum()]
        group, replicas = self._group, self._group.replicas
        find_different = group.start_comparing(numbers)
        over_replicas = group.num_replicas > 1 and options is not None
        differ = replicas.host.start_comparing(numbers[:1]) if over_replicas else lambda: False

        def finish() -> None:
            if find_different():
                self._refuse(seen, numbers)
            if differ():
                self._refuse_options(options, replicas.host.host_group)

        return finish

    def _refuse(self, seen: _Seen, numbers: list[int]) -> None:
        found = dict(zip(self._group.global_ranks, self._group.gather(numbers), strict=True))
        root = self._group.root
        apart = [
            [rank for rank in sorted(found) if found[rank][place] != found[root][place]]
            for place in range(len(numbers))
        ]
        if apart[0]:
            self._refuse_options(seen.options, self._group.host_group)
        if apart[1]:
            raise RuntimeError(
                f"global ranks {apart[1]} read another {seen.what} than global rank {root}; the "
                f"ranks of a pipeline must read the same data in the same order: call "
                f"L.seed_everything(...) before the data is made, seed generators of your own "
                f"alike in every process, and share samples out by nothing but "
                f"lightning_pipeoffload.data_parallel_rank()"
            )

    def _refuse_options(self, options: StepOptions | None, processes: Any) -> None:
        names = [name for name, _ in self._pipeline.module.named_parameters()]
        described = {} if options is None else options.describe(names)
        refuse_differences(described, processes, _SET_ALIKE)
