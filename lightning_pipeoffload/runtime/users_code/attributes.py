"""Attributes that a step writes, and placeholders for values of other ranks or stages.

A step that writes state of Python modules or classes is refused, since each stage would write its
own. This state is compared before and after a second run of the step, when caches are filled.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime import replaced
from lightning_pipeoffload.runtime.users_code.snapshot import (
    GONE,
    Attribute,
    Fingerprint,
    fingerprint,
    fingerprint_if_small,
    is_unchanged,
)
from lightning_pipeoffload.runtime.users_code.sources import REGISTRIES
from lightning_pipeoffload.runtime.users_code.users_lines import (
    in_brackets,
    is_librarys_file,
    is_user_module,
    running_user_line,
)

_MOST_VALUES = 1024  # of an attribute that is compared at each point of a trace


@dataclass(frozen=True, eq=False)
class NamedAttribute:
    """The attribute ``name`` of ``part``, the submodule of the user's module at ``path``."""

    path: str
    part: nn.Module
    name: str

    @property
    def attribute(self) -> Attribute:
        return Attribute(self.part, self.name)

    @property
    def key(self) -> tuple[int, str]:
        """A key that identifies the attribute of this object."""
        return id(self.part), self.name

    @property
    def label(self) -> str:
        """The path of the attribute for error messages, such as ``self.encoder.cache``."""
        return ".".join(filter(None, ("self", self.path, self.name)))

    @property
    def value(self) -> Any:
        """The current value; :data:`GONE` if there is no such attribute."""
        return vars(self.part).get(self.name, GONE)

    def put(self, value: Any) -> None:
        """Assign a value; delete the attribute if ``value`` is :data:`GONE`."""
        if value is GONE:
            vars(self.part).pop(self.name, None)
        else:
            vars(self.part)[self.name] = value


def named_attributes(module: nn.Module) -> Iterator[NamedAttribute]:
    """Yield all attributes of a module tree except parameters, buffers and modules."""
    for path, part in module.named_modules():
        for name in vars(part).keys() - REGISTRIES:
            yield NamedAttribute(path, part, name)


class GlobalWriteError(ValueError):
    """A step writes a variable of a Python module or class; each stage would write its own."""


class StepPoint(NamedTuple):
    """A segment of the step: its block, or the code before its block."""

    segment: int
    is_in_block: bool


class Write(NamedTuple):
    """A write to an attribute.

    Attributes:
        line: The line of the user's code; "" for a change in place, which is detected later.
        is_users: Whether the user's code writes it, not a library.
    """

    variable: NamedAttribute
    point: StepPoint
    line: str
    is_users: bool


class AttributeWatch:
    """Records the attributes that one run of a step writes, in order, in ``writes``.

    Args:
        module: The module whose step runs.
        compared: Attributes that are compared at each point though they are long.
    """

    def __init__(self, module: nn.Module, compared: Set[Attribute] = frozenset()) -> None:
        self._module = module
        self._compared = compared
        self.long: set[Attribute] = set()  # whose changes in place are not recorded
        self._paths = {id(part): path for path, part in module.named_modules()}
        self._point = StepPoint(0, is_in_block=False)
        self._seen: dict[tuple[int, str], tuple[NamedAttribute, Fingerprint]] = {}
        self._held: dict[tuple[int, str], None] = {}  # whose values can be changed in place
        self.writes: list[Write] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the writes within the context."""
        for variable in named_attributes(self._module):
            if self._is_long(variable):
                self.long.add(variable.attribute)
                self._seen[variable.key] = variable, [(variable.value, 0)]
            else:
                self._record_variable(variable)
        plain = nn.Module.__setattr__

        def record(part: nn.Module, name: str, value: Any) -> None:
            is_same = vars(part).get(name, GONE) is value and not _is_mutable(value)
            plain(part, name, value)
            if id(part) in self._paths and name in vars(part) and not is_same:
                variable = NamedAttribute(self._paths[id(part)], part, name)
                is_users_file = not is_librarys_file(sys._getframe(1).f_code.co_filename)
                self.writes.append(Write(variable, self._point, running_user_line(), is_users_file))
                self._record_variable(variable)

        with replaced(nn.Module, "__setattr__", record):
            yield

    def _is_long(self, variable: NamedAttribute) -> bool:
        value = variable.value
        return (
            _is_mutable(value)
            and variable.attribute not in self._compared
            and fingerprint_if_small(value, _MOST_VALUES) is None
        )

    def _record_variable(self, variable: NamedAttribute) -> None:
        value, key = variable.value, variable.key
        self._held.pop(key, None)
        if _is_mutable(value):
            self._held[key] = None
        self._seen[key] = variable, fingerprint(value) if key in self._held else [(value, 0)]

    def record_changes(self, following: StepPoint) -> None:
        """Record changes in place since the last comparison; called before ``following``."""
        with torch._C.DisableTorchFunction():  # private: this is no call of the step's
            for variable, before in [self._seen[key] for key in self._held]:
                if not is_unchanged(before, fingerprint(variable.value)):
                    self._record_write(variable, self._point)
        self._point = following

    def finish(self) -> None:
        """Record attributes that were written without ``setattr``, such as by ``__dict__``."""
        end = StepPoint(self._point.segment, is_in_block=False)
        now = {variable.key: variable for variable in named_attributes(self._module)}
        for key in now.keys() - self._seen.keys():
            self._record_write(now[key], end)
        for variable, before in [*self._seen.values()]:
            if variable.value is not before[0][0]:
                self._record_write(variable, end)

    def _record_write(self, variable: NamedAttribute, point: StepPoint) -> None:
        is_own = is_user_module(type(variable.part).__module__)
        self.writes.append(Write(variable, point, "", is_own))
        self._record_variable(variable)


def _is_mutable(value: Any) -> bool:
    if isinstance(value, (Tensor, np.ndarray, list, dict, set, deque)):
        return True
    kind = type(value)
    return hasattr(value, "__dict__") and not callable(value) and is_user_module(kind.__module__)


# Placeholders


class PlaceholderError(RuntimeError):
    """Code uses a value that this rank does not have, or no longer has."""


class Placeholder:
    """Raises an error with its message on any use; copies and pickles are placeholders too."""

    __slots__ = ()
    message: str

    def _raise(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise PlaceholderError(f"{self.message}{in_brackets(running_user_line())}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks for those of any object
            raise AttributeError(name)
        self._raise()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _raise_first((args, kwargs or {}))

    __iter__ = __len__ = __contains__ = __float__ = __int__ = __index__ = _raise
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = (
        _raise
    )
    __floordiv__ = __mod__ = __pow__ = __neg__ = __abs__ = __matmul__ = __round__ = _raise
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __call__ = __str__ = __format__ = _raise
    __getitem__ = __setitem__ = __delitem__ = _raise

    def __bool__(self) -> bool:
        self._raise()


def _raise_first(tree: Any) -> NoReturn:
    left = [tree]
    while left:
        part = left.pop(0)
        if isinstance(part, Placeholder):
            part._raise()
        if isinstance(part, (list, tuple)):
            left.extend(part)
        elif isinstance(part, dict):
            left.extend(part.values())
    raise RuntimeError("a value that another rank has is used")


class RemoteValue(Placeholder):
    """A placeholder for an attribute; ``local_value`` is that of this rank or stage."""

    __slots__ = ("message", "local_value")
    __hash__ = object.__hash__

    def __init__(self, message: str, local_value: Any) -> None:
        self.message = message
        self.local_value = local_value

    def __repr__(self) -> str:
        return f"<{self.message}>"


# State of Python modules and classes

Globals = dict[str, Fingerprint]
"""What each variable of Python modules and classes holds, by name."""


def record_globals(module: nn.Module) -> Globals:
    """Record the variables of the user's classes and Python modules that a module tree may use.

    These are the Python modules that define the classes of the tree, those that they import from,
    directly or not, and all classes in them.
    """
    kinds = {kind for part in module.modules() for kind in type(part).__mro__}
    states: Globals = {}
    for home in _imported_user_modules({kind.__module__ for kind in kinds}):
        kinds.update(value for value in vars(home).values() if isinstance(value, type))
        states |= _fingerprints(home.__name__, home)
    for kind in kinds:
        if is_user_module(kind.__module__):
            states |= _fingerprints(kind.__qualname__, kind)
    return states


def refuse_written_globals(before: Globals, after: Globals) -> None:
    """Raise an error if the step between the two snapshots has written any global."""
    changed = [
        f"{name} (a {type(now[0][0]).__name__})"
        for name, now in after.items()
        if not is_unchanged(before.get(name, []), now)
    ]
    if changed:
        raise GlobalWriteError(
            f"the step writes {', '.join(sorted(changed))}, which a Python module or a class "
            f"holds: each stage would write it for itself. Keep it in an attribute of the module "
            f"(self.seen = [] in __init__), or write it in a hook"
        )


def _fingerprints(owner: str, space: Any) -> Globals:
    return {
        f"{owner}.{name}": fingerprint(value)
        for name, value in vars(space).items()
        if not (name.startswith("__") or _is_definition(value))
    }


def _is_definition(value: Any) -> bool:
    return (
        isinstance(value, (type, ModuleType, nn.Module))
        or callable(value)
        or hasattr(type(value), "__get__")
    )


def _imported_user_modules(names: set[str]) -> Iterator[ModuleType]:
    visited: set[str] = set()
    left = sorted(names)
    while left:
        name = left.pop()
        if name in visited or not is_user_module(name) or name not in sys.modules:
            continue
        visited.add(name)
        yield sys.modules[name]
        for value in vars(sys.modules[name]).values():
            is_module = isinstance(value, ModuleType)
            left.append(value.__name__ if is_module else getattr(value, "__module__", None) or "")
