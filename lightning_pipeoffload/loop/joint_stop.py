"""What one rank sets ``trainer.should_stop`` to counts for all of them, after the same batch.

Nobody waits for another rank's news. At the end of a batch each rank casts a vote, and reads those
of the batch before, which are all there by then: a batch takes every rank. Only who wants to stop
waits for the votes of this batch, since all may want it. So what all ranks set stops them at once,
and what one rank sets after the next batch. What a step sets behind the blocks, on the last stage,
reaches the others before they end that batch, and stops them at once too.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch import Trainer

from lightning_pipeoffload.runtime.groups import PipelineGroup


class JointStop:
    """One rank's part in a fit's common decision to stop.

    Args:
        trainer: The trainer whose fit it is.
        group: The pipeline's processes.
    """

    def __init__(self, trainer: Trainer, group: PipelineGroup) -> None:
        self._trainer = trainer
        self._group = group
        self._wants = False
        self._decides = False
        self._num_steps = 0
        self._told: Callable[[], int] | None = None
        self._vote: Callable[[], int] | None = None

    def start_batch(self, num_microbatches: int, decides: bool) -> None:
        """Begin a training batch.

        Args:
            num_microbatches: The number of microbatches whose steps end on the last stage.
            decides: Whether training may stop after it; not within a plan of several batches.
        """
        self._hear()  # of the same batch, if an optimizer evaluates it again
        self._decides = decides
        self._num_steps = num_microbatches if self._group.is_root else 0
        if decides and not self._group.is_root:
            self._told = self._group.start_sharing(0, self._group.root)

    def end_step(self) -> None:
        """Count a microbatch whose step has come to its end; called on the last stage."""
        self._num_steps -= 1
        if self._num_steps == 0 and self._decides:
            self._told = self._group.start_sharing(self._is_asked, self._group.root)

    def end_batch(self) -> None:
        """Set ``should_stop`` as all ranks do; called after the hooks of a batch's end."""
        if not self._trainer.training:
            return
        self._hear()
        wants = self._is_asked
        stops = False
        if self._decides:
            before, self._vote = self._vote, self._group.world.start_counting(wants)
            stops = bool(before and before())
            if wants:
                stops = self._vote() == self._group.world.size or stops
        self._trainer.should_stop = stops
        self._wants = wants and not stops

    def settle(self) -> None:
        """Let what any rank has set count; called where ranks may wait for each other."""
        if self._vote is not None:
            self._vote()
            self._vote = None
        self._trainer.should_stop = self._group.world.start_counting(self._is_asked)() > 0
        self._wants = False

    @property
    def _is_asked(self) -> bool:
        return self._wants or self._trainer.should_stop

    def _hear(self) -> None:
        told, self._told = self._told, None
        if told is not None and told():
            self._wants = True
