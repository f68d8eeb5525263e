"""Weight gradients apart from input gradients: deferred by B, computed by W."""
