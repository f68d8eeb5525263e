"""A demo: a plain GPT, and the text of Python's standard library."""
