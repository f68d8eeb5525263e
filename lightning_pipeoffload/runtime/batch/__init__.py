"""Batches as trees of tensors: number of samples, split into microbatches, merge of results."""
