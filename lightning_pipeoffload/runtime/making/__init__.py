"""Constructs a module in parts: each rank allocates only the values that it owns."""

from .construction import Blueprint, constructing, costs_of_sizes, make_blueprint
from .parted_module import PartedModule
from .registered_parameters import HeapTrimmer, ParameterShape, making_shapes
