"""Optimizers that have the whole module's parameters and step with one rank's."""
