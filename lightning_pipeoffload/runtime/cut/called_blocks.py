"""Finds the blocks of a model: in its containers and, where these are several, in a step's calls.

The container with the most parameters is cut. Others that the step calls before or after it join,
such as ``layer1`` to ``layer4``, or an encoder's and a decoder's layers. A block that is a large
share of the work is cut at its own containers of blocks. Shares are of the whole step, so that the
chain does not depend on the number of stages. Each block of a frozen copy, such as a momentum
encoder, is next to its original: a stage has both, so that a hook can write one from the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, zip_longest
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from lightning_pipeoffload.runtime.compiled import compiled_call

_LISTS = nn.ModuleList | nn.ModuleDict
_JOINS = 1 / 16  # of the work: a container that joins the largest one
_IS_LARGE = 1 / 8  # a block that is cut at its own containers
_COVERS = 3 / 4  # of such a block's work: what these have

Names = list[str]
Containers = Mapping[str, Names]  # the names of the entries, by that of the container


@dataclass(frozen=True)
class ModuleCall:
    """A call of a module in a step; for repeated calls, the first with the work of all."""

    begin: int  # a counter that increases at the beginning and end of each call
    end: int
    work: int  # operations of its forward
    reads_values: bool
    has_graph: bool  # gradients are enabled


def containers_in(module: nn.Module) -> dict[str, Names]:
    """Return, by name, the entries of the containers inside a module, except parametrizations.

    A ModuleList of ModuleLists, which no step can call, has the entries of the inner ones.
    """
    containers = {
        path: [*_entries(path, part)]
        for path, part in module.named_modules()
        if path and isinstance(part, (nn.Sequential, _LISTS)) and not _is_parametrization(part)
    }
    return {path: names for path, names in containers.items() if names}


def _entries(path: str, container: nn.Module) -> Iterator[str]:
    for key, child in container.named_children():
        is_seen_through = isinstance(container, nn.ModuleList) and _is_plain_list(child)
        yield from _entries(f"{path}.{key}", child) if is_seen_through else (f"{path}.{key}",)


def _is_plain_list(part: nn.Module) -> bool:
    return isinstance(part, _LISTS) and type(part).forward is nn.Module.forward


def _is_parametrization(part: nn.Module) -> bool:
    return any(isinstance(each, ParametrizationList) for each in (part, *part.children()))


def count_outside_largest(module: nn.Module, names: Iterable[str]) -> tuple[int, int]:
    """Return the number of parameters of all modules but the largest, and of all."""
    sizes = [_num_parameters(module, name) for name in names]
    return sum(sizes) - max(sizes), sum(sizes)


def _num_parameters(module: nn.Module, name: str) -> int:
    return sum(parameter.numel() for parameter in module.get_submodule(name).parameters())


def is_ambiguous(module: nn.Module, name: str) -> bool:
    """Whether a container other than ``name`` may hold the blocks.

    Then the calls in a traced step decide.
    """
    containers = containers_in(module)
    entries = containers.get(name, [])
    if not any(count_outside_largest(module, names)[0] for names in containers.values()):
        return False
    return any(
        count_outside_largest(module, names)[1]
        and (_are_composed(module, names) or not _is_in(path, entries))
        for path, names in containers.items()
        if path != name
    )


def _is_in(path: str, outer: Iterable[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in outer)


def _are_composed(module: nn.Module, names: Iterable[str]) -> bool:
    """Whether modules are blocks themselves, not layers such as Linear."""
    parts = (module.get_submodule(name) for name in names)
    return all(any(True for _ in part.children()) for part in parts)


class CalledChains:
    """The chains of blocks that a step could be cut at.

    Args:
        module: The user's module.
        calls: The modules that its step calls, by name.
        work: The operations of its forward.
        is_whole: Whether to use only containers of which the step calls each entry with parameters.
    """

    def __init__(
        self, module: nn.Module, calls: Mapping[str, ModuleCall], work: int, is_whole: bool = True
    ) -> None:
        self._module, self._calls, self._work = module, calls, work
        self._containers = dict(self._find_containers(is_whole))

    def ranked_chains(self) -> list[Names]:
        """Return the names of each chain's blocks, in the order of their calls."""
        chains = (names for each in self._candidates() for names in self._with_copies(each))
        return [*map(list, dict.fromkeys(map(tuple, chains)))]

    def _candidates(self) -> Iterator[Names]:
        order = sorted(self._containers, key=self._preference_key)
        if order and count_outside_largest(self._module, self._containers[order[0]])[0]:
            joined = self._join_consecutive(self._containers, order[:1], _JOINS * self._work)
            yield [inner for name in joined for inner in self._blocks_inside(name)]
            yield joined
            # Also small ones, between which a library may branch by a block's value.
            yield self._join_consecutive(self._containers, order[:1], 0)
            yield from (self._containers[path] for path in order)

    def _with_copies(self, names: Names) -> Iterator[Names]:
        training = {name.rpartition(".")[0] for name in names if self._trains(name)}
        trained = [name for name in names if name.rpartition(".")[0] in training]
        frozen = [name for name in names if name not in trained]
        shapes_of = self._parameter_shapes
        if frozen and [*map(shapes_of, trained[: len(frozen)])] == [*map(shapes_of, frozen)]:
            first, second = (trained, frozen) if names[0] in trained else (frozen, trained)
            yield [name for pair in zip_longest(first, second) for name in pair if name]
        yield names

    def _trains(self, name: str) -> bool:
        return self._calls[name].has_graph and _trains(self._module.get_submodule(name))

    def _parameter_shapes(self, name: str) -> list[tuple[str, Any]]:
        parameters = self._module.get_submodule(name).named_parameters()
        return [(name, parameter.shape) for name, parameter in parameters]

    def holds_most(self, names: Names) -> bool:
        """Whether blocks have at least half of the step's work."""
        return 2 * self._work_of(names) >= self._work

    def _find_containers(self, is_whole: bool) -> Iterator[tuple[str, Names]]:
        closed = [path for path, part in self._module.named_modules() if path and _is_closed(part)]
        for path, names in containers_in(self._module).items():
            called = self._in_order(name for name in names if name in self._calls)
            left = [name for name in names if name not in self._calls]
            is_missing = is_whole and any(_num_parameters(self._module, name) for name in left)
            if called and not is_missing and self._are_apart(called) and not _is_in(path, closed):
                yield path, called

    def _preference_key(self, path: str) -> tuple[bool, int, int]:
        is_dict = isinstance(self._module.get_submodule(path), nn.ModuleDict)
        names = self._containers[path]
        return is_dict, -count_outside_largest(self._module, names)[0], self._calls[names[0]].begin

    def _join_consecutive(
        self, containers: Containers, first: Sequence[str], least: float
    ) -> Names:
        """Return the entries of containers that are called one after another, the largest first."""
        work = {path: self._work_of(names) for path, names in containers.items()}
        others = [path for path in containers if work[path] >= least]
        joined: Names = []
        for path in dict.fromkeys((*first, *sorted(others, key=lambda path: -work[path]))):
            together = self._in_order([*joined, *containers[path]])
            runs = [inside for inside, _ in groupby(together, set(containers[path]).__contains__)]
            if runs.count(True) == 1 and self._are_apart(together):
                joined = together
        return joined

    def _blocks_inside(self, name: str) -> Names:
        """Return a large block's own blocks, where it consists of them; else the block."""
        call = self._calls[name]
        if call.reads_values or call.work <= _IS_LARGE * self._work:
            return [name]
        inside = {
            path: names
            for path, names in self._containers.items()
            if _is_in(path, [name]) and _are_composed(self._module, names)
        }
        names = self._join_consecutive(inside, (), 0)
        if len(names) > 1 and self._work_of(names) >= _COVERS * call.work:
            return [inner for each in names for inner in self._blocks_inside(each)]
        return [name]

    def _in_order(self, names: Iterable[str]) -> Names:
        return sorted(names, key=lambda name: self._calls[name].begin)

    def _are_apart(self, names: Names) -> bool:
        calls = [self._calls[name] for name in names]
        return all(before.end < after.begin for before, after in pairwise(calls))

    def _work_of(self, names: Iterable[str]) -> int:
        return sum(self._calls[name].work for name in names)


def _is_closed(part: nn.Module) -> bool:
    """Whether a module is never cut inside: it is compiled as a whole, or a torchmetrics metric."""
    is_metric = any(base.__name__ == "Metric" for base in type(part).__mro__)
    return is_metric or compiled_call(part) is not None


def propose_blocks(module: nn.Module, num_stages: int = 2) -> str:
    """Propose a ``blocks=...`` argument before a step has run; "" if there are too few modules.

    Args:
        module: The user's module.
        num_stages: The least number of blocks, which are in the order of the modules; their calls
            may be in another order.
    """
    containers = {
        path: names
        for path, names in containers_in(module).items()
        if sum(_trains(module.get_submodule(name)) for name in names) > 1
    }
    while containers:
        names = [name for path in outermost(containers) for name in containers.pop(path)]
        if len(names) >= num_stages:
            return format_blocks_argument(module, names)
    children = _children(module)
    return format_blocks_argument(module, children) if len(children) >= num_stages else ""


def inner_blocks(module: nn.Module, name: str) -> Names:
    """Name the entries of the containers inside a block; without any, its parts with weights."""
    containers = containers_in(module)
    inside = [path for path in containers if path.startswith(f"{name}.")]
    names = [entry for path in outermost(inside) for entry in containers[path]]
    return names or _children(module.get_submodule(name), f"{name}.")


def outermost(paths: Iterable[str]) -> Names:
    """Return the modules that are inside no other module of ``paths``."""
    all_paths = {*paths}
    return [path for path in paths if not _is_in(path, all_paths - {path})]


def _trains(part: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in part.parameters())


def _children(module: nn.Module, prefix: str = "") -> Names:
    """Return the outermost modules with parameters, where there are several."""
    children = {f"{prefix}{key}": part for key, part in module.named_children() if _trains(part)}
    if len(children) == 1:
        ((name, part),) = children.items()
        return _children(part, f"{name}.")
    return list(children)


def names_of_parents(names: Iterable[str]) -> Names:
    """Return the names of the blocks' parent modules, each once, in the order of the blocks."""
    return [*dict.fromkeys(name.rpartition(".")[0] or name for name in names)]


def format_blocks_argument(module: nn.Module, names: Sequence[str]) -> str:
    """Return ``blocks=...`` as a user writes it."""
    patterns: list[str] = []
    for parent, group in groupby(names, lambda name: name.rpartition(".")[0]):
        group_names = list(group)
        container = module.get_submodule(parent)
        is_whole = group_names == [f"{parent}.{key}" for key, _ in container.named_children()]
        is_list = isinstance(container, nn.ModuleList | nn.Sequential)
        if is_whole and group_names == list(names) and is_list:
            return f'blocks="{parent}"'
        patterns += [f"{parent}.*"] if is_whole else group_names
    return "blocks=[" + ", ".join(f'"{pattern}"' for pattern in patterns) + "]"
