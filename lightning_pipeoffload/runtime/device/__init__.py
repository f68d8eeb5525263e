"""The device: streams, events, settings of CUDA, and times of a plan's actions on it."""
