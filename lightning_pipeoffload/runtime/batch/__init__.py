"""A batch as a tree of tensors: which are samples, its parts, and merging of their results."""
