"""What the user's Python modules and classes hold, of which no rule of the contract knows.

Each stage would write it for itself, and so would every look at the step. So a step that writes it
is refused: it is looked at before and after a second run of the step, which caches no more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import nn

from lightning_pipeoffload.runtime.users_code.attributes import look_at
from lightning_pipeoffload.runtime.users_code.libraries import is_users
from lightning_pipeoffload.runtime.users_code.look import Look, is_same_look

Beside = dict[str, Look]
"""A look at each variable of a Python module or class, by its name."""


def look_beside(module: nn.Module) -> Beside:
    """Look at what the classes of a module tree, and the Python modules around them, hold."""
    kinds = {kind for part in module.modules() for kind in type(part).__mro__}
    found: Beside = {}
    for home in _reachable({kind.__module__ for kind in kinds}):
        kinds.update(value for value in vars(home).values() if isinstance(value, type))
        found |= _look(home.__name__, home)
    for kind in kinds:
        if is_users(kind.__module__):
            found |= _look(kind.__qualname__, kind)
    return found


def refuse_written(before: Beside, after: Beside) -> None:
    """Refuse a step between two looks if it has written any of this.

    Raises:
        ValueError: It has.
    """
    changed = [n for n, look in after.items() if not is_same_look(before.get(n, []), look)]
    if changed:
        raise ValueError(
            f"the step writes {', '.join(sorted(changed))}, which a Python module or a class "
            f"holds: each stage would write it for itself. Keep it in an attribute of the module "
            f"(self.seen = [] in __init__), or write it in a hook"
        )


def _look(owner: str, space: Any) -> Beside:
    return {
        f"{owner}.{name}": look_at(value)
        for name, value in vars(space).items()
        if not (name.startswith("__") or _is_definition(value))
    }


def _is_definition(value: Any) -> bool:
    return (
        isinstance(value, (type, ModuleType, nn.Module))
        or callable(value)
        or hasattr(type(value), "__get__")
    )


def _reachable(names: set[str]) -> Iterator[ModuleType]:
    """Yield the user's of these Python modules, and those from which they have something."""
    known: set[str] = set()
    left = sorted(names)
    while left:
        name = left.pop()
        if name in known or not is_users(name) or name not in sys.modules:
            continue
        known.add(name)
        yield sys.modules[name]
        for value in vars(sys.modules[name]).values():
            is_module = isinstance(value, ModuleType)
            left.append(value.__name__ if is_module else getattr(value, "__module__", None) or "")
