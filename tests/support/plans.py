"""Schedules as text, for tests: one line per rank."""

from lightning_pipeoffload.schedule import Action, Schedule


def plan(text):
    lines = text.strip().splitlines()
    return Schedule.of([Action.parse(word) for word in line.split()] for line in lines)


# One of each shape: BW, several stages per rank, B and W apart, a V, copies.
SHAPES = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "po_h")
