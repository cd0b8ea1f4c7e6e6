"""Mutants of a Python module, made from its syntax tree.

Operators: comparison (== and !=, < and <=, in and not in, ...), off_by_one, arithmetic (+ and -), condition (negated),
logic (and/or), constant (True/False, min/max), removed (a statement that is executed for its effect).

Does not touch: imports, annotations, docstrings, texts of messages, logging.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from typing import Any

from tests.full.mutation.mutant import Mutant

Change = Callable[[ast.AST], None]

FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
SIGNS: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}
LOGIC: dict[type[ast.boolop], type[ast.boolop]] = {ast.And: ast.Or, ast.Or: ast.And}
NAMES = {"min": "max", "max": "min"}


def python_mutants(path: str, source: str) -> list[Mutant]:
    """Every mutant of the module, in the order of its lines."""
    tree = ast.parse(source)
    before = ast.unparse(tree)
    found = []
    for index, (node, skipped) in enumerate(_walk(tree)):
        if skipped:
            continue
        for operator, change in _changes(node):
            mutated = copy.deepcopy(tree)
            target = next(other for place, (other, _) in enumerate(_walk(mutated)) if place == index)
            change(target)
            after = ast.unparse(ast.fix_missing_locations(mutated))
            if after != before:
                found.append(Mutant(path=path, operator=operator, before=before, after=after))
    return found


def _walk(tree: ast.AST, skipped: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Nodes in order, and whether they are none of our business."""
    yield tree, skipped
    for name, value in ast.iter_fields(tree):
        inside = skipped or name in ("annotation", "returns") or isinstance(tree, ast.JoinedStr | ast.Import)
        inside = inside or isinstance(tree, ast.ImportFrom | ast.Raise) or _is_logging(tree)
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child, inside)


def _is_logging(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith("log.")


def _changes(node: ast.AST) -> Iterator[tuple[str, Change]]:
    for fits, operator, change in PERMISSIONS:
        if fits(node):
            yield operator, change
    for index, statement in enumerate(getattr(node, "body", []) if isinstance(node, BLOCKS) else []):
        if _has_effect(statement):
            yield "removed", _removal(index)


def _flip(target: ast.AST) -> None:
    assert isinstance(target, ast.Compare)
    target.ops[0] = FLIPPED[type(target.ops[0])]()


def _negate(target: ast.AST) -> None:
    assert isinstance(target, ast.If | ast.While | ast.IfExp)
    target.test = ast.UnaryOp(op=ast.Not(), operand=target.test)


def _negate_filter(target: ast.AST) -> None:
    assert isinstance(target, ast.comprehension)
    target.ifs[0] = ast.UnaryOp(op=ast.Not(), operand=target.ifs[0])


def _has_effect(statement: ast.stmt) -> bool:
    """A call, a deletion, or an assignment to something that outlives the function."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call) and not _is_logging(statement)
    if isinstance(statement, ast.Assign):
        return not isinstance(statement.targets[0], ast.Name)
    return isinstance(statement, ast.AugAssign | ast.Delete)


def _removal(index: int) -> Change:
    def remove(target: ast.AST) -> None:
        target.body[index] = ast.Pass()  # type: ignore[attr-defined]

    return remove


BLOCKS = ast.FunctionDef | ast.For | ast.While | ast.If | ast.With | ast.Try | ast.ExceptHandler
PERMISSIONS: tuple[tuple[Callable[[Any], bool], str, Callable[[Any], None]], ...] = (
    (lambda n: isinstance(n, ast.Compare) and type(n.ops[0]) in FLIPPED, "comparison", _flip),
    (lambda n: isinstance(n, ast.Constant) and type(n.value) is int, "off_by_one",
     lambda n: setattr(n, "value", n.value + 1)),
    (lambda n: isinstance(n, ast.Constant) and type(n.value) is bool, "constant",
     lambda n: setattr(n, "value", not n.value)),
    (lambda n: isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in NAMES, "constant",
     lambda n: setattr(n.func, "id", NAMES[n.func.id])),
    (lambda n: isinstance(n, ast.BinOp | ast.AugAssign) and type(n.op) in SIGNS, "arithmetic",
     lambda n: setattr(n, "op", SIGNS[type(n.op)]())),
    (lambda n: isinstance(n, ast.BoolOp), "logic", lambda n: setattr(n, "op", LOGIC[type(n.op)]())),
    (lambda n: isinstance(n, ast.If | ast.While | ast.IfExp), "condition", _negate),
    (lambda n: isinstance(n, ast.comprehension) and bool(n.ifs), "condition", _negate_filter),
)  # fmt: skip
"""(whether it fits a node, name of the operator, how it changes the node)."""
