"""Generators that modules hold are seeded (rule 3); iterators and files are refused (rule 6)."""

from __future__ import annotations

import io
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import nn

from lightning_pipeoffload.runtime import NOTHING, mix_seed
from lightning_pipeoffload.runtime.users_code.users_lines import in_brackets, running_user_line

REGISTRIES = frozenset(nn.Module().__dict__)  # what torch keeps among a module's attributes
_MOST_VALUES = 1000  # a longer container is data
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class RandomGenerators:
    """The random generators in attributes of a module tree.

    Attributes:
        exist: Whether there are any.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places: dict[str, tuple[Any, Any]] = {}
        self.find()

    def find(self) -> None:
        """Find the attributes that hold generators; later they may hold other generators."""
        for place in _held_objects(self._module):
            if is_random_generator(place.value):
                self._places[place.label] = place.holder, place.key
        self.exist = bool(self._places)

    def seed(self, seed: int) -> None:
        """Seed each generator from ``seed`` and its name."""
        for label, generator in self._now():
            _seed(generator, mix_seed(seed, zlib.crc32(label.encode())))

    def _now(self) -> Iterator[tuple[str, Any]]:
        for label, (holder, key) in self._places.items():
            try:
                value = holder[key]
            except LookupError:  # a hook has taken it out
                continue
            if is_random_generator(value):
                yield label, value

    def restoring(self) -> AbstractContextManager[Any]:
        """Restore the state of each generator afterwards."""
        return self._restoring() if self._places else NOTHING

    @contextmanager
    def _restoring(self) -> Iterator[None]:
        restore = self._snapshot()
        try:
            yield
        finally:
            restore()

    def replay(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return a function that makes a context with each generator's present state."""
        return self._replayed(self._snapshot()) if self._places else lambda: NOTHING

    def _replayed(self, restore: Callable[[], None]) -> Callable[[], AbstractContextManager[Any]]:
        @contextmanager
        def replayed() -> Iterator[None]:
            with self._restoring():
                restore()
                yield

        return replayed

    def _snapshot(self) -> Callable[[], None]:
        """Return a function that restores the present state of each generator."""
        before = [(generator, state_of_generator(generator)) for _, generator in self._now()]

        def restore() -> None:
            for generator, state in before:
                set_generator_state(generator, state)

        return restore


def is_random_generator(value: Any) -> bool:
    """Return whether a value is a random generator that can be seeded."""
    return isinstance(value, _GENERATORS) and not isinstance(value, random.SystemRandom)


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    else:
        generator.seed(seed & 0xFFFFFFFF)


def state_of_generator(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    is_pythons = isinstance(generator, random.Random)
    return generator.getstate() if is_pythons else generator.get_state()


def set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


@contextmanager
def refusing_held_iterators(module: nn.Module) -> Iterator[None]:
    """Raise ``ValueError`` if a step in the context advances a module's iterator, or adds one."""
    iterators = [
        place
        for place in _held_objects(module)
        if is_iterator(place.value) and not isinstance(place.holder, tuple)
    ]
    errors: list[ValueError] = []
    for place in iterators:
        place.holder[place.key] = _RefusingIterator(place, errors)
    try:
        yield
        _refuse_new_iterators(module, {id(place.value) for place in iterators})
    finally:
        for place in iterators:
            place.holder[place.key] = place.value
    if errors:  # that the step has caught, or its caller, which runs it on made-up values
        raise errors[0]


def _refuse_new_iterators(module: nn.Module, known_ids: set[int]) -> None:
    for place in _held_objects(module):
        if is_iterator(place.value) and id(place.value) not in known_ids:
            raise _refusal(place)


def is_iterator(value: Any) -> bool:
    """Return whether a value is an iterator or an open file, which reading advances."""
    if isinstance(value, io.IOBase):
        return not value.closed
    return hasattr(type(value), "__next__") and not isinstance(value, _RefusingIterator)


class _RefusingIterator:
    def __init__(self, place: _HeldObject, errors: list[ValueError]) -> None:
        self._place, self._errors = place, errors

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._errors.append(_refusal(self._place))
        raise self._errors[-1]

    __next__ = send = read = readline = readlines = write = writelines = seek = truncate = _refuse

    def __iter__(self) -> _RefusingIterator:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._place.value, name)


def _refusal(place: _HeldObject) -> ValueError:
    return ValueError(
        f"{place.label} is a {type(place.value).__name__} that the step advances"
        f"{in_brackets(running_user_line())}, and each stage would advance its own; read in the "
        f"data set or in a hook (on_train_batch_start, say), and draw random numbers from torch's "
        f"global generator or from a torch.Generator that is an attribute of the module"
    )


class _HeldObject(NamedTuple):
    """A value in a module's ``__dict__``, or in a container of an attribute, at ``key``."""

    label: str
    value: Any
    holder: Any
    key: Any


def _held_objects(module: nn.Module) -> list[_HeldObject]:
    seen: set[int] = set()
    held: list[_HeldObject] = []
    for path, part in module.named_modules():
        space = vars(part)
        for name in space.keys() - REGISTRIES:
            label = f"self.{path}.{name}" if path else f"self.{name}"
            held += _leaves(_HeldObject(label, space[name], space, name), seen)
    return held


def _leaves(place: _HeldObject, seen: set[int]) -> Iterator[_HeldObject]:
    value = place.value
    if not isinstance(value, (list, tuple, deque, dict)):
        yield place
    elif id(value) not in seen and len(value) <= _MOST_VALUES:
        seen.add(id(value))
        parts = dict.items(value) if isinstance(value, dict) else enumerate(value)
        for key, part in [*parts]:
            yield from _leaves(_HeldObject(f"{place.label}[{key!r}]", part, value, key), seen)
