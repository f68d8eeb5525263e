"""Lightning's throughput of a pipeline, whose ranks share their batches and the work on each."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from typing_extensions import override

_SHARED = ("batches_per_sec", "samples_per_sec", "items_per_sec")


class PipelineThroughput(Throughput):
    """Counts a batch once, whatever the number of ranks, and for each its part of the operations.

    Lightning's takes it that each device has batches of its own, and does all that is done on them.
    """

    _num_ranks = 1

    @classmethod
    def replacing(cls, plain: Throughput, num_ranks: int) -> PipelineThroughput:
        """Make one that measures what ``plain`` is to.

        Args:
            plain: Lightning's own.
            num_ranks: The ranks of a pipeline; replicas have batches of their own.
        """
        made = cls()
        made.__dict__.update(plain.__dict__)
        made._num_ranks = num_ranks
        return made

    @override
    def update(self, *, flops: int | None = None, **counts: Any) -> None:
        # A share of them need not be a whole number.
        share: Any = None if flops is None else flops / self._num_ranks
        super().update(flops=share, **counts)

    @override
    def compute(self) -> dict[str, int | float]:
        metrics = super().compute()
        for name in _SHARED:
            if name in metrics:
                metrics[name] /= self._num_ranks
        return metrics


def share_throughput(trainer: Trainer, num_ranks: int) -> None:
    """Let a ThroughputMonitor among the callbacks, which is set up, count as a pipeline does."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined] # set at run time
        if isinstance(callback, ThroughputMonitor):
            throughputs = callback._throughputs  # private: nothing else has them
            for stage, plain in throughputs.items():
                throughputs[stage] = PipelineThroughput.replacing(plain, num_ranks)
