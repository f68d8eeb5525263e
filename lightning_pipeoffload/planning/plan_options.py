"""The options of a plan that sizes leave open; neither torch nor lightning is imported."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipeoffload.schedule import (
    FAMILIES,
    PlanOption,
    ScheduleError,
    check_slices,
    options,
)


def options_of(
    schedule: str,
    num_microbatches: Sequence[int],
    num_chunks: int | str | None,
    recompute: Sequence[str] = ("none",),
    head_weight_grad: Sequence[str] = ("W",),
    num_sequence_slices: int = 1,
) -> list[PlanOption]:
    """Return the options of a schedule, or with "auto" of all families.

    Args:
        schedule: Its name, or "auto".
        num_microbatches: The numbers to choose among.
        num_chunks: Stages of a rank; "auto" or None: any number that the schedule takes.
        recompute: The values to choose among.
        head_weight_grad: The same of the head's weight gradient.
        num_sequence_slices: Slices of each sequence.

    Raises:
        ScheduleError: There is no such family, or it does not accept these sizes.
    """
    if schedule != "auto":
        if schedule not in FAMILIES:
            raise ScheduleError(
                f"schedule ({schedule}) cannot be planned for a device; use auto or one of "
                f"{', '.join(FAMILIES)}"
            )
        check_slices(schedule, FAMILIES[schedule], num_sequence_slices)
        if FAMILIES[schedule].can_slice and num_sequence_slices == 1:
            raise ScheduleError(f"{schedule} is for slices of sequences; set num_sequence_slices=8")
    chunks = num_chunks if isinstance(num_chunks, int) else None
    sizes = num_microbatches, None, chunks, recompute, head_weight_grad, num_sequence_slices
    wanted = [option for option in options(*sizes) if schedule in ("auto", option.schedule)]
    if not wanted and schedule != "auto":
        raise ScheduleError(f"{schedule} does not accept num_chunks ({chunks})")
    return wanted
