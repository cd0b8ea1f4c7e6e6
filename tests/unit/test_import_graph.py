"""Which imports of a file are seen, and which a process needs to start."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.support.import_graph import ImportGraph, Reached


def reached(folder: Path, files: dict[str, str], *, starts_only: bool = False) -> Reached:
    """What `python -m ours` reaches."""
    for name, text in {"ours/__init__.py": "", **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return ImportGraph(folder, ("ours", "theirs")).reach("ours", starts_only=starts_only)


@pytest.mark.parametrize(
    "text",
    [
        "import numpy.linalg",
        "from numpy import array",
        "try:\n    import json\nfinally:\n    import numpy",
        "class A:\n    import numpy",
        "if True:\n    import numpy",
        "import importlib\nnumpy = importlib.import_module('numpy')",
        "from ours.part import a",
    ],
)
def test_what_stands_outside_of_functions_is_needed_to_start(text: str, tmp_path: Path) -> None:
    found = reached(tmp_path, {"ours/__main__.py": text, "ours/part.py": "import numpy\na = 1"}, starts_only=True)
    assert {name.partition(".")[0] for name in found.foreign} == {"numpy"}


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    import numpy",
        "async def f():\n    from numpy import array",
        "try:\n    import numpy\nexcept ImportError:\n    numpy = None",
        "with suppress(ImportError):\n    import numpy",
        "def f():\n    return __import__('numpy')",
        "def f():\n    return import_module(name='numpy')",
        "from importlib import import_module as load\ndef f():\n    return load('numpy.linalg')",
        "NAME = 'numpy'\ndef f():\n    return import_module(NAME)",
        "def f():\n    for name in ('json', 'numpy'):\n        import_module(name)",
        "def f():\n    return [import_module(name) for name in ('json', 'numpy')]",
        "def f(part):\n    return import_module(f'numpy.{part}')",
        "def f():\n    return pkgutil.resolve_name('numpy:array')",
        "def f():\n    from .part import a",
        "def f():\n    from . import part",
        "def f():\n    return import_module('.part', __name__)",
        "def f():\n    return plugin('ours.plugs', name)",
        "def f():\n    return import_module(f'ours.plugs.{name}')",
        "from ours.plugs import registry",
        "ENGINE = 'ours.part.Engine'",
        "ENGINE = 'ours.part:Engine'",
        "command = [sys.executable, '-m', 'ours.part', '--flag']",
        "command = (sys.executable, '-m', 'theirs')",
    ],
)
def test_what_a_function_can_import_is_seen_and_not_needed_to_start(text: str, tmp_path: Path) -> None:
    files = {
        "ours/__main__.py": text,
        "ours/part.py": "import numpy",
        "ours/plugs/__init__.py": "",
        "ours/plugs/registry.py": "def load(name):\n    return plugin(__package__, name)",
        "ours/plugs/one.py": "import numpy",
        "theirs/__init__.py": "",
        "theirs/__main__.py": "import numpy",
    }
    assert {name.partition(".")[0] for name in reached(tmp_path, files).foreign} == {"numpy"}
    assert reached(tmp_path, files, starts_only=True).foreign == {}


@pytest.mark.parametrize(
    "text",
    [
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy",
        "import typing\nif typing.TYPE_CHECKING:\n    from numpy import array",
        '"""Not ours.part, which imports numpy."""',
        "import json, os.path",
        "log('ours.unknown is not there')",
    ],
)
def test_what_is_never_imported_is_not_seen(text: str, tmp_path: Path) -> None:
    assert reached(tmp_path, {"ours/__main__.py": text, "ours/part.py": "import numpy"}).foreign == {}


@pytest.mark.parametrize(
    "text", ["import_module(sys.argv[1])", "import_module(f'{a}.{b}')", "[sys.executable, '-m', name]"]
)
def test_a_name_that_only_a_running_process_knows_is_said(text: str, tmp_path: Path) -> None:
    assert reached(tmp_path, {"ours/__main__.py": f"\n{text}"}).unreadable == {"ours/__main__.py:2"}
