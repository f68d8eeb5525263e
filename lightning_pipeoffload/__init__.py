"""Zero-bubble pipeline parallelism with planned activation offload for PyTorch Lightning."""

__version__ = "0.1.0"
