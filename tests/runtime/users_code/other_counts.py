"""A Python module of a user's, which keeps a number; for tests."""

seen = 0
