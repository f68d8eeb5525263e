"""The base of a step's record and of its parts: each says which of its fields depend on lengths.

A record of new lengths is derived from traced ones (:mod:`.derived_records`): fields of numbers
that depend on the lengths are interpolated, others have to be equal in all of the traced ones.
"""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any, ClassVar

from typing_extensions import Self

BY_LENGTHS = {"is_by_lengths": True}
"""Metadata of a field whose numbers depend on the lengths of the microbatch."""
OF_TRACE = {"is_by_lengths": None}
"""Metadata of a field that a derived record lacks: others complete it, or read a traced one."""


class RecordPart:
    """A dataclass; a field without metadata is the same for all lengths, unless it is a part."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def structure(self) -> tuple[Any, ...]:
        """What does not depend on lengths, for comparison."""
        values = (getattr(self, each.name) for each in fields(self) if not each.metadata)
        return tuple(v.structure if isinstance(v, RecordPart) else v for v in values)

    @property
    def length_dependent_values(self) -> tuple[Any, ...]:
        """What depends on lengths."""
        values = (getattr(self, name) for name in self._names_by_lengths)
        return tuple(v.length_dependent_values if isinstance(v, RecordPart) else v for v in values)

    def with_length_values(self, values: tuple[Any, ...], **others: Any) -> Self:
        """Return a copy with other :attr:`length_dependent_values`, and other ``others``."""
        for name, value in zip(self._names_by_lengths, values, strict=True):
            part = getattr(self, name)
            others[name] = part.with_length_values(value) if isinstance(part, RecordPart) else value
        return replace(self, **others)

    def freeze(self) -> None:
        """Refuse to set fields from now on, also of the parts; containers can still be changed."""
        for value in vars(self).values():
            if isinstance(value, RecordPart):
                value.freeze()
        vars(self)["_is_frozen"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "_is_frozen" in vars(self):
            raise FrozenInstanceError(f"cannot set {name} of the record of a step, it is complete")
        super().__setattr__(name, value)

    @property
    def _names_by_lengths(self) -> list[str]:
        return [
            each.name
            for each in fields(self)
            if each.metadata == BY_LENGTHS or isinstance(getattr(self, each.name), RecordPart)
        ]
