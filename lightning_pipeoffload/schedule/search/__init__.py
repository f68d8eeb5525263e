"""Searches for an order of actions."""

from .problem import ROUNDING
