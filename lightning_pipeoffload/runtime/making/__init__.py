"""Constructs a module in parts: each rank allocates only the values that it owns."""

from .construction import (
    Blueprint,
    chain_and_costs_by_size,
    constructing_local_stages,
    make_blueprint,
)
from .parted_module import PartedModule
from .registered_parameters import HeapTrimmer, ParameterShape, making_parameter_shapes
