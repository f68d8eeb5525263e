"""A solver that decides order and copies together."""
