"""Passes: functions that make a plan of a schedule, step by step."""
