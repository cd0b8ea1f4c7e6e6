"""Plug-ins: modules of one package that all have the same function, found by the names of their files."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from importlib.util import find_spec
from typing import Any


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
    try:
        found = find_spec(package)
    except ModuleNotFoundError:
        return ()
    modules = pkgutil.iter_modules((found.submodule_search_locations if found else None) or ())
    return tuple(sorted(module.name for module in modules if not module.name.startswith("_")))
