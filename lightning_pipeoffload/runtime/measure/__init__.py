"""Measured costs of stages, copies and messages on this machine."""
