"""The reference vectors of the specification (tests/vectors.json), for tests to read their expected values from.

    python -m tests.vectors          # every key of the file, with the tests that read it or why none does

`tests/unit/test_vectors.py` demands that each key is read by a test or excused in `EXCUSED`.
"""

from __future__ import annotations

import ast
import copy
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
Key = tuple[str, ...]

TABLES: frozenset[Key] = frozenset({("V10.trace", "fresh"), ("V10.trace", "reeval")})
"""Values whose own keys are data, steps and prompts, and no names: they are read whole."""

EXCUSED: dict[Key, str] = {
    ("V20.sched_v5_m5", "official_sync"): "the released code's syncs at steps 1, 6, 11 meet no re-evaluation: ADR 0010",
    ("V20.sched_v5_m5", "official_lag"): "the lag of those syncs: ADR 0010",
}
"""Key -> why nothing here computes it."""


def vector(name: str, *keys: str) -> Any:
    """What the file has under these keys; a copy."""
    found = _file()[name]
    for key in keys:
        found = found[key]
    return copy.deepcopy(found)


def tokens(rows: Sequence[Sequence[float]]) -> list[float]:
    """The two padded rows of V2 to V5 and V12, of 3 and 2 tokens, one after the other."""
    return [*rows[0][:3], *rows[1][:2]]


@cache
def _file() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((TESTS / "vectors.json").read_text(encoding="utf-8"))
    return found


def leaves(found: Any = None, above: Key = ()) -> Iterator[Key]:
    """Every key of the file that has a value; of a list of rows, the keys of a row, once."""
    found = _file() if found is None else found
    rows = found if isinstance(found, list) and found and isinstance(found[0], dict) else [found]
    if above in TABLES or not isinstance(rows[0], dict):
        yield above
        return
    for key in dict.fromkeys(key for row in rows for key in row):
        yield from leaves(next(row[key] for row in rows if key in row), (*above, key))


def readers() -> dict[Key, list[str]]:
    """Key -> the tests that read it, as path::name."""
    found: dict[Key, list[str]] = {key: [] for key in leaves()}
    for path in sorted(TESTS.rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        if "import tokens, vector" not in source and "import vector" not in source:
            continue
        for test, words in words_of_tests(source).items():
            for key in found:
                if words.issuperset(key):
                    found[key].append(f"{path.relative_to(TESTS.parent).as_posix()}::{test}")
    return found


def words_of_tests(source: str) -> dict[str, frozenset[str]]:
    """Test -> the strings by which it can reach a vector: arguments of `vector`, subscripts, parameters and tables.

    What a test uses of its module, assignments and functions, is part of it.
    """
    module = {name: node for node in ast.parse(source).body for name in _names(node)}
    tests = [name for name in module if name.startswith("test_")]
    return {test: frozenset(_words([module[name] for name in _used(module, test)])) for test in tests}


def _names(node: ast.stmt) -> list[str]:
    """What a statement of a module defines."""
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def _used(module: Mapping[str, ast.stmt], test: str) -> list[str]:
    """The test and every name of the module that it needs, directly or through others."""
    found = [test]
    for name in found:
        loaded = {node.id for node in ast.walk(module[name]) if isinstance(node, ast.Name)}
        found += [other for other in sorted(loaded & module.keys()) if other not in found]
    return found


def _words(nodes: Sequence[ast.stmt]) -> Iterator[str]:
    for node in nodes:
        places: list[ast.AST] = [node] if not isinstance(node, ast.FunctionDef) else list(node.decorator_list)
        for part in ast.walk(node):
            if isinstance(part, ast.Subscript):
                places.append(part.slice)
            if isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id == "vector":
                places += part.args
        for place in places:
            for part in ast.walk(place):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def main() -> None:
    for key, tests in readers().items():
        sys.stdout.write(f"{' > '.join(key)}: {', '.join(tests) or EXCUSED.get(key, 'NO TEST')}\n")


if __name__ == "__main__":
    main()
