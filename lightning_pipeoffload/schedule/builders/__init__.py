"""Functions that make a schedule for a number of ranks and microbatches; one family a file."""
