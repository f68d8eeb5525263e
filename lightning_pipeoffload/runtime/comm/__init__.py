"""Communication between ranks: the mesh of processes, messages, sums over replicas."""
