"""The families of schedules: those that are built by a name without a solver."""

from __future__ import annotations

from .builders.classic import gpipe, interleaved_1f1b, late_weight_gradients, one_f_one_b
from .builders.grouped import grouped, offloaded, repeated
from .builders.v_adaptive import v
from .builders.v_shape import one_f_one_b_v, v_half, v_min
from .builders.zb import zb, zb_in_activations
from .builders.zb_v import zb_v
from .placement import v as down_and_up
from .recipe import Recipe

__all__ = ["FAMILIES"]

FAMILIES = {
    "gpipe": Recipe(gpipe),
    "1f1b": Recipe(one_f_one_b),
    "interleaved_1f1b": Recipe(interleaved_1f1b, 2, None),
    "zb_h1": Recipe(late_weight_gradients, given={"depth": 1}),
    "zb_h2": Recipe(late_weight_gradients, given={"depth": 2}),
    "zb_1p": Recipe(zb_in_activations, given={"multiple": 1}),
    "zb_2p": Recipe(zb_in_activations, given={"multiple": 2}),
    "zb": Recipe(zb),
    "zb_v": Recipe(zb_v, 2, 2, down_and_up),
    "1f1b_v": Recipe(one_f_one_b_v, 2, 2, down_and_up),
    "v_min": Recipe(v_min, 2, 2, down_and_up, takes_seconds=True),
    "v_half": Recipe(v_half, 2, 2, down_and_up, takes_seconds=True),
    "v": Recipe(v, 2, 2, down_and_up, takes_seconds=True),
    "gis": Recipe(repeated, 2, None, given={"group": "all"}),
    "gis_h": Recipe(repeated, 2, None, given={"group": "half"}),
    "grouped": Recipe(grouped, 2, None),
    "uniform": Recipe(repeated, 2, None, given={"group": "one"}),
    "po_h": Recipe(offloaded, 2, None, given={"amount": "half"}),
    "po_f": Recipe(offloaded, 2, None, given={"amount": "full"}),
}
