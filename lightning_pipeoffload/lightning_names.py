"""One copy of Lightning for both of its names: ``lightning.pytorch`` and ``pytorch_lightning``.

The two packages hold the same files, but a class of one is not the class of the other. Importing
this module makes the package that the program imported first serve both names, and likewise
``lightning.fabric`` and ``lightning_fabric``: every module is loaded once.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

PACKAGES = frozenset({"lightning", "pytorch_lightning", "lightning_fabric"})
_STANDALONE = {
    "lightning.pytorch": "pytorch_lightning",
    "lightning.fabric": "lightning_fabric",
}


class _OtherNames(MetaPathFinder, Loader):
    """Finds modules of the package that is not in use, as those of the one that is.

    Args:
        in_use: The package in use for each other name.
    """

    def __init__(self, in_use: Mapping[str, str]) -> None:
        self._in_use = in_use

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        name = self._canonical_name(fullname)
        spec = importlib.util.find_spec(name) if name else None
        if spec is None:
            return None
        is_package = spec.submodule_search_locations is not None
        return ModuleSpec(fullname, self, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        _refuse_two_versions()
        module = importlib.import_module(self._canonical_name(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # importlib has replaced the spec by that of the other name.
        module.__spec__ = module.__spec__.loader_state  # type: ignore[union-attr]

    def _canonical_name(self, name: str) -> str:
        for other, in_use in self._in_use.items():
            if f"{name}.".startswith(f"{other}."):
                return in_use + name.removeprefix(other)
        return ""


def _refuse_two_versions() -> None:
    try:
        versions = version("lightning"), version("pytorch-lightning")
    except PackageNotFoundError:  # one is not installed
        return
    if len({*versions}) > 1:
        raise ImportError(
            f"the program imports lightning {versions[0]} and pytorch_lightning {versions[1]}; "
            f"install one version: pip install lightning=={versions[0]} "
            f"pytorch-lightning=={versions[0]}, or import one of them only (lightning_pipeoffload "
            f"imports lightning)"
        )


def _install_alias_finder() -> None:
    """Install the finder.

    Raises:
        ImportError: Both packages are imported already.
    """
    names = (*_STANDALONE, *_STANDALONE.values())
    # A module's own name: of one copy for both names where this ran before.
    loaded = {sys.modules[name].__name__ for name in names if name in sys.modules}
    within, standalone = sorted(loaded & _STANDALONE.keys()), sorted(loaded - _STANDALONE.keys())
    if standalone and within:
        raise ImportError(
            f"{within[-1]} and {standalone[-1]} are both imported, as two copies of Lightning; "
            f"import lightning_pipeoffload before them, and both names mean one copy"
        )
    in_use = {other: name for name, other in _STANDALONE.items()}
    sys.meta_path.insert(0, _OtherNames(_STANDALONE if standalone else in_use))


_install_alias_finder()
