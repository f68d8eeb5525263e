"""Lists other modules that could be the blocks of a model, for messages that refuse a chain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

from torch import nn

_CONTAINERS = nn.ModuleList | nn.Sequential | nn.ModuleDict

Names = Sequence[str]


def propose(module: nn.Module, num_stages: int = 2) -> str:
    """Return ``blocks=...`` of at least so many blocks, or "", before a step has run.

    The order is that of the modules, which may not be that of their calls.
    """
    for containers in _levels(module, lambda name: True):
        names = [name for entries in containers for name in entries]
        if len(names) >= num_stages:
            return as_argument(module, names)
    children = _children(module)
    return as_argument(module, children) if len(children) >= num_stages else ""


def candidates(module: nn.Module, calls: Mapping[str, int]) -> Iterator[Names]:
    """Yield lists of blocks in the order of their calls: of several containers, then of one."""
    for level in _levels(module, calls.__contains__):
        containers = [sorted(entries, key=calls.__getitem__) for entries in level]
        containers.sort(key=lambda entries: -_size(module, entries))
        apart: list[Names] = []
        for entries in containers:
            first, last = calls[entries[0]], calls[entries[-1]]
            if all(last < calls[other[0]] or calls[other[-1]] < first for other in apart):
                apart.append(entries)
        yield sorted((name for entries in apart for name in entries), key=calls.__getitem__)
        yield from containers


def _levels(module: nn.Module, is_block: Callable[[str], bool]) -> Iterator[list[Names]]:
    """Yield the entries of the outermost containers, then those of the containers inside."""
    passed: set[str] = set()
    while True:
        level: dict[str, Names] = {}
        for path, part in module.named_modules():
            is_inside = any(path.startswith(f"{outer}.") for outer in level)
            if path in passed or not isinstance(part, _CONTAINERS) or is_inside:
                continue
            entries = [(f"{path}.{key}".lstrip("."), entry) for key, entry in part.named_children()]
            names = [name for name, _ in entries if is_block(name)]
            trained = [entry for name, entry in entries if is_block(name) and _trains(entry)]
            if path and len(trained) > 1:
                level[path] = names
        if not level:
            return
        yield list(level.values())
        passed |= level.keys()


def inner_blocks(module: nn.Module, name: str) -> list[str]:
    """Return the entries of the containers in a block, or else its children with parameters."""
    part = module.get_submodule(name)
    level = next(_levels(part, lambda name: True), [])
    return [f"{name}.{inner}" for names in level for inner in names] or _children(part, f"{name}.")


def _trains(part: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in part.parameters())


def _children(module: nn.Module, prefix: str = "") -> list[str]:
    """Return the outermost modules with parameters, where there are several."""
    found = {f"{prefix}{key}": part for key, part in module.named_children() if _trains(part)}
    if len(found) == 1:
        ((name, part),) = found.items()
        return _children(part, f"{name}.")
    return list(found)


def _size(module: nn.Module, names: Names) -> int:
    return sum(p.numel() for name in names for p in module.get_submodule(name).parameters())


def as_argument(module: nn.Module, names: Names) -> str:
    """Return ``blocks=...`` as a user writes it."""
    patterns: list[str] = []
    for parent, group in groupby(names, lambda name: name.rpartition(".")[0]):
        own = list(group)
        container = module.get_submodule(parent)
        is_whole = own == [f"{parent}.{key}" for key, _ in container.named_children()]
        if is_whole and own == list(names) and not isinstance(container, nn.ModuleDict):
            return f'blocks="{parent}"'
        patterns += [f"{parent}.*"] if is_whole else own
    return "blocks=[" + ", ".join(f'"{pattern}"' for pattern in patterns) + "]"
