"""Schedules of sequences in slices: 1F1B and ZB-H1 whose units are slices of microbatches.

A unit is a slice of a microbatch. Units run forward in order; backward they run by microbatch, each
microbatch's slices in reverse, for a slice's keys and values get gradients from all later ones. So
the last stage begins a microbatch's backward when it has all of its slices, and every rank has as
many more forwards in its warm-up as there are slices but one.

Source: Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language Model
Training", 2024, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..actions import Action, Kind
from ..schedule import Schedule
from .classic import delayed_weights, one_stage_per_rank

__all__ = ["seq_1f1b", "seq_zb"]


def seq_1f1b(
    num_ranks: int, num_microbatches: int, num_chunks: int, *, num_sequence_slices: int = 1
) -> Schedule:
    """1F1B with slices as its units (Seq1F1B); with one slice it is 1F1B.

    The bubble is p - 1 times F, B and W of a slice, and that of a microbatch's slices that wait for
    the last one; rank i keeps p - i + s - 1 activations of a slice.

    ``draw(build("seq_1f1b", 2, 2, num_sequence_slices=2))``::

        rank 0 F0 F1 F2 ......BW1   F3 BW0   ...BW3   BW2
        rank 1 ...F0 F1 BW1   F2 BW0   F3 BW3   BW2   ......

    Args:
        num_sequence_slices: Slices of each sequence.
    """
    num_units = num_microbatches * num_sequence_slices
    units = one_stage_per_rank(num_units, _warm_ups(num_ranks, num_sequence_slices))
    return _in_reverse(units, num_sequence_slices)


def seq_zb(
    num_ranks: int, num_microbatches: int, num_chunks: int, *, num_sequence_slices: int = 1
) -> Schedule:
    """ZB-H1 with slices as its units; with one slice it is ZB-H1.

    ``draw(build("seq_zb", 2, 2, num_sequence_slices=2))``::

        rank 0 F0 F1 F2 ...B1 W1 F3 B0 W0 B3 W3 B2 W2
        rank 1 ...F0 F1 B1 F2 B0 W1 F3 B3 W0 B2 W3 W2

    Args:
        num_sequence_slices: Slices of each sequence.
    """
    num_units = num_microbatches * num_sequence_slices
    warm_ups = _warm_ups(num_ranks, num_sequence_slices)
    return _in_reverse(delayed_weights(num_units, warm_ups, range(num_ranks)), num_sequence_slices)


def _warm_ups(num_ranks: int, num_slices: int) -> Sequence[int]:
    """Return the forwards of each rank before its first backward."""
    return [num_ranks - 1 - rank + num_slices - 1 for rank in range(num_ranks)]


def _in_reverse(units: Schedule, count: int) -> Schedule:
    """Rename B, W and BW so that each microbatch's slices run backward in reverse."""

    def renamed(action: Action) -> Action:
        if action.kind is Kind.F:
            return action
        first, place = divmod(action.microbatch, count)
        return action._replace(microbatch=first * count + count - 1 - place)

    return Schedule.of((map(renamed, rank) for rank in units), units.name, count)
