"""Simulation of a plan before it runs: seconds of every lane, memory of every rank."""
