"""Plug-ins: classes of one kind, found by name or by place.

    "ppo"                         a module of the kind's own package, or the kind's file in a folder of `contrib`
    "package.module:MyLoss"       a user's own, or "file.py:MyLoss"

A module is a plug-in if it defines one class of the kind that can be made; that class is it. Nothing is imported
before it is named.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from bapo.core.errors import ConfigError, did_you_mean
from bapo.core.user_code import load_function

CONTRIB = "contrib"
"""The package next to the core: one folder a method."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of plug-in."""

    what: str
    """As messages and files of `contrib` call it: "loss"."""
    key: str
    """The setting that names one: "loss.name"."""
    options: str
    """The table of its own settings: "loss.options"."""
    package: str
    """Where the core's own are."""
    base: str
    """"package.module:Class" that each derives from."""

    @property
    def is_installed(self) -> bool:
        """Whether this process has them: an image of the buffer or of workers has no learner."""
        return find_spec(self.package.partition(".")[0]) is not None

    def find(self, name: str) -> type[Any]:
        """The class of that name. Raises: ConfigError, also for anything else of that name."""
        base = self._base()
        if ":" in name:
            found: Any = load_function(name, key=self.key)
            if isinstance(found, type) and issubclass(found, base) and not inspect.isabstract(found):
                return found
            raise ConfigError(
                f"{self.key} = {name!r}: it must be a class that derives from {base.__name__} "
                f"({self.base.replace(':', '.')}) and defines {', '.join(sorted(base.__abstractmethods__))}"
            )
        for module in (f"{self.package}.{name}", f"{CONTRIB}.{name}.{self.what}"):
            if name.isidentifier() and _exists(module) and (shipped := _defined(importlib.import_module(module), base)):
                return shipped
        known = self.names()
        raise ConfigError(
            f'{self.key} = "{name}": unknown {self.what}{did_you_mean(name, known)}; use one of {", ".join(known)}, '
            "or your own: file.py:Class"
        )

    def names(self) -> tuple[str, ...]:
        """Names of all that are shipped, sorted; imports the core's own."""
        base = self._base()
        own = {
            name
            for name in module_names(self.package)
            if _defined(importlib.import_module(f"{self.package}.{name}"), base)
        }
        others = {name for name in module_names(CONTRIB) if _exists(f"{CONTRIB}.{name}.{self.what}")}
        return tuple(sorted(own | others))

    def _base(self) -> Any:
        module, _, name = self.base.partition(":")
        return getattr(importlib.import_module(module), name)


def _defined(module: ModuleType, base: type[Any]) -> type[Any] | None:
    """The class of that kind which this module defines; None if there is none."""
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, base)
        and value.__module__ == module.__name__
        and not inspect.isabstract(value)
    ]
    return found[-1] if found else None


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it
        return False


def plugin(package: str, name: str) -> Any:
    """The module of that name, imported."""
    return importlib.import_module(f"{package}.{name}")


@cache
def plugin_names(package: str, factory: str) -> tuple[str, ...]:
    """Names of the modules that have this function, sorted."""
    return tuple(name for name in module_names(package) if hasattr(plugin(package, name), factory))


def module_names(package: str) -> tuple[str, ...]:
    """Names of all modules of a package that begin without an underscore, sorted, of which none is imported; empty
    where the package is not installed."""
    return tuple(sorted(_modules(package)))


def _modules(package: str) -> Iterator[str]:
    try:
        found = find_spec(package)
    except ModuleNotFoundError:
        return
    for module in pkgutil.iter_modules((found.submodule_search_locations if found else None) or ()):
        if not module.name.startswith("_"):
            yield module.name
