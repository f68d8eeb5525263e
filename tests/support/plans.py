"""Schedules as text, for tests: one line per rank."""

from lightning_pipeoffload.schedule import Schedule

plan = Schedule.parse


# One of each shape: BW, several stages per rank, B and W apart, a V, copies.
SHAPES = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "po_h")
