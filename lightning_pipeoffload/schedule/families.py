"""The families of schedules: what can be built by a name without a solver."""

from __future__ import annotations

from .builders.classic import gpipe, interleaved_1f1b, one_f_one_b, zb_h1, zb_h2
from .builders.grouped import gis, gis_h, grouped, po_f, po_h, uniform
from .builders.v_adaptive import v
from .builders.v_shape import one_f_one_b_v, v_half, v_min
from .builders.zb import zb, zb_1p, zb_2p
from .builders.zb_v import zb_v
from .placement import v as down_and_up
from .recipe import Recipe

__all__ = ["FAMILIES"]

FAMILIES = {
    "gpipe": Recipe(gpipe),
    "1f1b": Recipe(one_f_one_b),
    "interleaved_1f1b": Recipe(interleaved_1f1b, num_chunks=2, max_chunks=None),
    "zb_h1": Recipe(zb_h1),
    "zb_h2": Recipe(zb_h2),
    "zb_1p": Recipe(zb_1p),
    "zb_2p": Recipe(zb_2p),
    "zb": Recipe(zb),
    "zb_v": Recipe(zb_v, 2, 2, down_and_up),
    "1f1b_v": Recipe(one_f_one_b_v, 2, 2, down_and_up),
    "v_min": Recipe(v_min, 2, 2, down_and_up, takes_seconds=True),
    "v_half": Recipe(v_half, 2, 2, down_and_up, takes_seconds=True),
    "v": Recipe(v, 2, 2, down_and_up, takes_seconds=True),
    "gis": Recipe(gis, num_chunks=2, max_chunks=None),
    "gis_h": Recipe(gis_h, num_chunks=2, max_chunks=None),
    "grouped": Recipe(grouped, num_chunks=2, max_chunks=None),
    "uniform": Recipe(uniform, num_chunks=2, max_chunks=None),
    "po_h": Recipe(po_h, num_chunks=2, max_chunks=None),
    "po_f": Recipe(po_f, num_chunks=2, max_chunks=None),
}
