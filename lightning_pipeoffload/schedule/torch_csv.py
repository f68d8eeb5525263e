"""The compute-only CSV format of ``torch.distributed.pipelining``.

One line per rank, one cell per action, empty cells for idle slots. torch's runtime executes what is
written here; it writes I for our B and B for our BW. Its DualPipeV has cells such as
``(7F4;0B0)OVERLAP_F_B``, which are read as one action after the other.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from os import PathLike

from .actions import Action, Kind, ScheduleError

TORCH_NAMES = {Kind.F: "F", Kind.B: "I", Kind.W: "W", Kind.BW: "B"}
KINDS = {torch_name: kind for kind, torch_name in TORCH_NAMES.items()}


def write_csv(path: str | PathLike[str], actions: Iterable[Iterable[Action]]) -> None:
    """Write the compute actions of every rank.

    Raises:
        ScheduleError: There is another action than F, B, W and BW.
    """
    rows = [[_to_torch(action) for action in rank] for rank in actions]
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)


def read_csv(path: str | PathLike[str]) -> list[list[Action]]:
    """Read the compute actions of every rank; idle slots are left out.

    Raises:
        ScheduleError: A cell is not an action of torch's compute-only format.
    """
    with open(path, newline="") as file:
        return [
            [_from_torch(text, path) for cell in row for text in _one_by_one(cell)]
            for row in csv.reader(file)
        ]


def _to_torch(action: Action) -> str:
    if action.kind not in TORCH_NAMES:
        raise ScheduleError(
            f"{action} cannot be written: torch's format has compute actions only; "
            "write the schedule from before its copies and lower()"
        )
    return f"{action.stage}{TORCH_NAMES[action.kind]}{action.microbatch}"


def _one_by_one(cell: str) -> list[str]:
    overlapped = re.fullmatch(r"\((.*)\)OVERLAP_F_B", cell.strip())
    texts = overlapped[1].split(";") if overlapped else [cell]
    return [text for text in texts if text.strip()]


def _from_torch(cell: str, path: str | PathLike[str]) -> Action:
    match = re.fullmatch(r"(\d+)([FIBW])(\d+)", cell.strip())
    if match is None:
        raise ScheduleError(
            f"{cell!r} in {path} is no compute action of torch's format; "
            "write stage, kind (F, I, W or B for both gradients) and microbatch, as in 2F0"
        )
    return Action(KINDS[match[2]], int(match[1]), int(match[3]))
