"""Slices of a microbatch along its sequences: their positions, and their attention."""

from .attention import BlockOnSlice, attending_to_slices
from .block_check import SlicedBlockCheck
from .slice_checks import SliceChecks
from .slices import Dims, EarlierSlices, SequenceDims, SequenceSlice
