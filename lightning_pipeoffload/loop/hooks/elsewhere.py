"""Placeholders for what steps return on another rank; to use one raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any

from torch import Tensor

from lightning_pipeoffload.runtime.users_code.elsewhere import Placeholder


class OutputsElsewhere(Placeholder, dict[str, Any]):
    """Stands for a step's outputs, of which numbers are on all ranks."""

    def __init__(self, kind: str, root: int, fetch: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self.message = (
            f"of what {kind} returns, only numbers are on every rank; the rest is on global rank "
            f"{root}. Use self.log in {kind} and trainer.callback_metrics here, or keep it in an "
            f"attribute for a hook of the epoch's end"
        )
        self._fetch = fetch

    def __getitem__(self, key: str) -> Any:
        """Return a number.

        Raises:
            RuntimeError: It is none.
        """
        numbers = self._fetch()
        return numbers[key] if key in numbers else self._use()

    def get(self, key: str, default: Any = None) -> Any:
        """Return a number, as ``[key]`` does."""
        return self[key]

    def __bool__(self) -> bool:
        return True

    __reduce_ex__ = keys = values = items = copy = Placeholder._use


def numbers_in(outputs: Any) -> dict[str, Any]:
    """Return the plain numbers in what a step returned, by name; a tensor alone is the loss."""
    named = outputs if isinstance(outputs, Mapping) else {"loss": outputs}
    return {name: value for name, value in named.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, Number) or (isinstance(value, Tensor) and value.dim() == 0)
