"""Searches for an order of actions."""
