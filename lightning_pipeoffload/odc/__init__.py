"""On-demand communication: sharded data parallelism that synchronizes once per minibatch."""
