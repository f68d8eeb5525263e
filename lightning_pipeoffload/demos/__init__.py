"""A demo: a plain GPT, and the text of Python's standard library."""

from .gpt import GPT, Block
from .python_source import PythonSource, Windows, find_source_files, split_files
