"""Weight gradients apart from input gradients: what is left for W, and how W makes it."""
