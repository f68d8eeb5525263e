"""A word where shapes go into a file in the place of values."""

from __future__ import annotations

import sys
import warnings

_SAVED = (
    "torch.save() has written shapes without values for the weights that other ranks have: "
    "trainer.save_checkpoint(path), called on all ranks, writes all values, and "
    "trainer.strategy.gather(parameter) returns that of one"
)


def warn_of_saving() -> None:
    """Warn if ``torch.save`` pickles the object whose ``__reduce_ex__`` calls this.

    A pickle that stays in the run may do without values; a file would pass for the weights.
    """
    pickler = sys._getframe(2)
    if pickler.f_globals.get("__name__") == "torch.serialization":
        warnings.warn(_SAVED, stacklevel=5)
