"""Runs something on a module and leaves the module as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Give every attribute and container of the module tree its contents back afterwards."""
    attributes = [(child.__dict__, dict(child.__dict__)) for child in module.modules()]
    containers = [
        (value, value.copy())
        for _, saved in attributes
        for value in saved.values()
        if isinstance(value, (list, dict, set))
    ]
    for place, saved in attributes:
        for name, value in saved.items():
            if type(value) is Tensor:
                place[name] = value.clone()
    try:
        yield
    finally:
        for container, contents in containers:
            _refill(container, contents)
        for place, saved in attributes:
            _refill(place, saved)


def _refill(container: Any, contents: Any) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(contents)
    else:
        container.update(contents)
