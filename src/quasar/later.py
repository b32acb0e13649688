"""Keeps transformers from importing hqq, and with it torch's compiler, in every process.

Where hqq is installed, :mod:`transformers.cache_utils` imports one class of it, for a cache that hardly anybody asks
for; that takes as long as importing torch. While that module is imported, a stand-in answers in the place of the class,
and imports hqq when it is used. ``import hqq`` by anybody else, and transformers' own use of it, are as without this.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

_IMPORTER = "transformers.cache_utils"
_SLOW = "hqq.core.quantize"


class _Later:
    """A class of a module that is imported once the class is used."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def _imported(self) -> Any:
        return getattr(import_module(self._module), self._name)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._imported(), attribute)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._imported()(*args, **kwargs)


class _StandIn(ModuleType):
    """The slow module, as long as only names are taken from it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Later(self.__name__, name)


class _Loader(SourceFileLoader):
    """Runs the importing module with the stand-in in the place of the slow one."""

    def exec_module(self, module: ModuleType) -> None:
        stand_in = _StandIn(_SLOW)
        if sys.modules.setdefault(_SLOW, stand_in) is not stand_in:  # imported already: there is nothing to save
            return super().exec_module(module)
        try:
            super().exec_module(module)
        finally:
            if sys.modules.get(_SLOW) is stand_in:
                del sys.modules[_SLOW]


class _Finder(MetaPathFinder):
    """Finds the importing module as it would be found without this, and leaves every other one alone."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _IMPORTER:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def import_hqq_later() -> None:
    """From now on, transformers does not import hqq before it uses it; called twice, it is done once."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
