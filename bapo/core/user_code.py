"""Find a user's function or class by name, and say where in the user's file something went wrong.

    "package.module:function"   a module that Python finds
    "folder/file.py:function"   a file, relative to the working directory; what lies next to it can be imported
    "package.module.function"   the same as the first, as TRL writes it (only where an adapter says so)

Every mistake is a ConfigError that says what was searched for and what exists.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import bapo
from bapo.core.errors import ConfigError, did_you_mean


def load_function(name: str, *, key: str, dots: bool = False) -> Callable[..., Any]:
    """The callable of that name; `key` names the setting in the messages.

    Args:
        dots: "package.module.function" is a name as well.
    Raises: ConfigError.
    """
    found = load_object(name, key=key, dots=dots)
    if not callable(found):
        attribute = name.rpartition(":" if ":" in name else ".")[2]
        raise ConfigError(f"{key} {name!r}: {attribute} is a {type(found).__name__}, not a function")
    return cast(Callable[..., Any], found)


def load_object(name: str, *, key: str, dots: bool = False) -> Any:
    """What has that name in its module, like `load_function`: a function, or a list of them. Raises: ConfigError."""
    place, _, attribute = name.rpartition(":")
    if dots and not place:
        place, _, attribute = name.rpartition(".")
    if not place or not attribute:
        raise ConfigError(f'{key} {name!r} must have the form "package.module:function" or "file.py:function"')
    module = _module(place, f"{key} {name!r}")
    found = getattr(module, attribute, None)
    if found is None:
        hint = did_you_mean(attribute, (known for known in vars(module) if not known.startswith("_")))
        raise ConfigError(f"{key} {name!r}: {place} has no {attribute!r}{hint}")
    return found


def place_of(error: BaseException) -> str:
    """File and line of the innermost frame that raised `error`: " (score.py line 12)"; empty when only ours ran."""
    # Python's own frames follow a failed import.
    ours = ("<frozen", f"{Path(bapo.__file__).parent}{os.sep}")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    return f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})" if frames else ""


def _module(place: str, what: str) -> ModuleType:
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise ConfigError(f"{what}: file {place} not found (in {Path.cwd()})")
    try:
        return _file_module(Path(place).resolve()) if is_file else importlib.import_module(place)
    except Exception as error:  # importing runs a user's module, which may raise anything
        advice = (
            "" if is_file else "; add the folder of a module next to the config to PYTHONPATH, or use file.py:function"
        )
        raise ConfigError(
            f"{what}: importing {place} failed: {type(error).__name__}: {error}{place_of(error)}{advice}"
        ) from error


def _file_module(path: Path) -> ModuleType:
    """The file as a module: loaded once, under a name that no other module has."""
    name = f"bapo_user_file:{path}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Last in the path: a file called `random.py` next to it must not hide the real one.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:  # Ctrl-C, too, must not leave half a module where the next import finds it
        del sys.modules[name]
        raise
    return module
