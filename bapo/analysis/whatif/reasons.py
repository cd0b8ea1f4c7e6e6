"""What a reason word means: the docstring beneath the constant that holds it.

`Reason` has the words that several composers share; a composer may define words of its own in its file, in any class or
at the top, the same way. So a sentence can be made of every word without a list of composers.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from functools import cache

from bapo.algorithms import composer


@cache
def meanings(algorithm: str) -> dict[str, str]:
    """Reason word -> its docstring in one line, for the composer of this name."""
    modules = (composer, importlib.import_module(f"bapo.algorithms.composers.{algorithm}"))
    return {word: text for module in modules for word, text in _documented(ast.parse(inspect.getsource(module)).body)}


def _documented(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """(value, docstring) of every string constant of a block, and of the classes in it."""
    for node, behind in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef):
            yield from _documented(node.body)
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        text = behind.value if isinstance(behind, ast.Expr) else None
        if _is_text(value) and _is_text(text):
            yield value.value, " ".join(text.value.split())  # type: ignore[union-attr]


def _is_text(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
