"""Optimizers that refer to the whole module's parameters and step those of one rank."""
