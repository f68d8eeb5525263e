"""Schedules as text, for tests: one line per rank."""

from lightning_pipeoffload.schedule import SCHEDULES, Schedule

plan = Schedule.parse


# One of each shape: BW, several stages per rank, B and W apart, a V, copies.
SHAPES = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "po_h")

# Those that schedule="auto" chooses among, where sequences run whole.
WHOLE = [name for name, r in SCHEDULES.items() if name != "optpipe" and not r.can_slice]
