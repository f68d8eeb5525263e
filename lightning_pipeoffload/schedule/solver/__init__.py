"""A solver that decides order and copies together, and what it starts from."""
