"""One rank's batches: Lightning's loops around a step, and the plan's run in its place."""
