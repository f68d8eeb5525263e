"""PipeOffload: the uniform block with its longest-lived stages, or all of them, on the host.

Wan et al., "PipeOffload", ICML 2025, section 3: PO-H keeps about a quarter of the uniform block's
peak, PO-F a number of activations that does not grow with the pipeline.
"""

from __future__ import annotations

from ..costs import Costs
from ..passes.offload import offload_activations
from ..schedule import Schedule
from .grouped import uniform

__all__ = ["UNMEASURED", "po_f", "po_h"]

UNMEASURED = Costs(1.0, 1.0, 1.0, offload=1.5, reload=1.5)
"""Before anything is known: k = 1, at which copies of everything are just about hidden."""


def po_h(
    num_ranks: int, num_microbatches: int, num_chunks: int, *, costs: Costs | None = None
) -> Schedule:
    """Build PO-H: half of each rank's stages are offloaded, those that live longest.

    Of two ranks with two stages each, the first does this; a copy that OFFLOAD or RELOAD starts
    runs on a lane of its own, beside the F, B and W that follow::

        0F0 0OFFLOAD0 2F0 0FREE0 0F1 0OFFLOAD1 2B0 0RELOAD0 2W0 0FREE1 2F1 0B0 0W0 0RELOAD1 ...

    Args:
        num_ranks: Ranks of the pipeline.
        num_microbatches: Microbatches of one step.
        num_chunks: Stages per rank, 2 or more.
        costs: The costs of the stages, copies among them; None: k = 1.
    """
    return _offloaded(uniform(num_ranks, num_microbatches, num_chunks), costs, "half")


def po_f(
    num_ranks: int, num_microbatches: int, num_chunks: int, *, costs: Costs | None = None
) -> Schedule:
    """Build PO-F: everything is offloaded that comes back in time.

    Args:
        num_ranks: Ranks of the pipeline.
        num_microbatches: Microbatches of one step.
        num_chunks: Stages per rank, 2 or more.
        costs: The costs of the stages, copies among them; None: k = 1.
    """
    return _offloaded(uniform(num_ranks, num_microbatches, num_chunks), costs, "full")


def _offloaded(schedule: Schedule, costs: Costs | None, amount: str) -> Schedule:
    return offload_activations(schedule, costs or UNMEASURED, amount)[0]
