"""The compute-only CSV format of ``torch.distributed.pipelining``.

One line per rank, one cell per action, empty cells for idle slots. torch's runtime executes what is
written here; it writes I for our B and B for our BW. Its DualPipeV has cells such as
``(7F4;0B0)OVERLAP_F_B``, which are read as one action after the other.

Copies, REDUCE and STEP stand in the cell of the compute action that they follow, as in
``2F0 2OFFLOAD0``: torch reads a cell's first action and no further, so it executes the same order
without them.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from os import PathLike

from .actions import TRANSFERS, Action, Kind, ScheduleError

TORCH_NAMES = {Kind.F: "F", Kind.B: "I", Kind.W: "W", Kind.BW: "B"}
KINDS = {torch_name: kind for kind, torch_name in TORCH_NAMES.items()}
BESIDE_COMPUTE = set(Kind) - TORCH_NAMES.keys() - TRANSFERS


def write_csv(path: str | PathLike[str], actions: Iterable[Iterable[Action]]) -> None:
    """Write the compute actions of every rank, and its copies, REDUCE and STEP.

    Raises:
        ScheduleError: There is a transfer, or a copy before all compute actions.
    """
    rows = [list(_cells(rank)) for rank in actions]
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)


def read_csv(path: str | PathLike[str]) -> list[list[Action]]:
    """Read a file that ``write_csv`` or torch wrote; idle slots are left out.

    Raises:
        ScheduleError: It is no text, or a cell is not an action of torch's compute-only format,
            with copies, REDUCE and STEP or not.
    """
    try:
        with open(path, newline="") as file:
            rows = list(csv.reader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ScheduleError(f"{path} has no rows of text, one for each rank: {error}") from error
    return [
        [action for cell in row for text in _one_by_one(cell) for action in _read(text, path)]
        for row in rows
    ]


def _cells(actions: Iterable[Action]) -> Iterator[str]:
    cell: list[str] = []
    for action in actions:
        if action.kind in TORCH_NAMES:
            if cell:
                yield " ".join(cell)
            cell = [f"{action.stage}{TORCH_NAMES[action.kind]}{action.microbatch}"]
        elif action.kind in BESIDE_COMPUTE and cell:
            cell.append(str(action))
        else:
            raise ScheduleError(
                f"{action} cannot be written: the format has compute actions, and copies after "
                "one; write the schedule from before lower()"
            )
    yield " ".join(cell)


def _one_by_one(cell: str) -> list[str]:
    overlapped = re.fullmatch(r"\((.*)\)OVERLAP_F_B", cell.strip())
    texts = overlapped[1].split(";") if overlapped else [cell]
    return [text for text in texts if text.strip()]


def _read(text: str, path: str | PathLike[str]) -> Iterator[Action]:
    first, *copies = text.split()
    yield _from_torch(first, path)
    yield from map(Action.parse, copies)


def _from_torch(cell: str, path: str | PathLike[str]) -> Action:
    match = re.fullmatch(r"(\d+)([FIBW])(\d+)", cell.strip())
    if match is None:
        raise ScheduleError(
            f"{cell!r} in {path} is no compute action of torch's format; "
            "write stage, kind (F, I, W or B for both gradients) and microbatch, as in 2F0"
        )
    return Action(KINDS[match[2]], int(match[1]), int(match[3]))
