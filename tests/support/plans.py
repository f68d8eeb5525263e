"""Schedules as text, for tests: one line per rank."""

from lightning_pipeoffload.schedule import Action, Schedule


def plan(text):
    lines = text.strip().splitlines()
    return Schedule.of([Action.parse(word) for word in line.split()] for line in lines)
