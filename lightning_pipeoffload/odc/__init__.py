"""On-demand communication: sharded data parallelism whose ranks meet once per minibatch."""
