"""Mutants of a Lua script, made from its tokens.

Operators: comparison, off_by_one, arithmetic, logic, constant (true/false, min/max, one key for another), condition
(negated), removed (a line that is one call).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from buffer_service.store.redis.keys import INDEX
from tests.full.mutation.mutant import Mutant

TOKEN = re.compile(
    r"(?P<comment>--[^\n]*)|(?P<text>'[^'\n]*')|(?P<number>\d+)|(?P<key>\bK\.\w+)|(?P<name>[A-Za-z_][\w.]*)"
    r"|(?P<operator>==|~=|<=|>=|\.\.|[-+*/<>=#%])|(?P<blank>\s+)|(?P<other>.)"
)
FLIPPED = {"==": "~=", "~=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">"}
SIGNS = {"+": "-", "-": "+"}
LOGIC = {"and": "or", "or": "and", "true": "false", "false": "true", "math.min": "math.max", "math.max": "math.min"}
ONE_CALL = re.compile(r"\s*(?!(?:return|if|for|while|local|function)\b)[a-z_]+\(.*\)")
CONDITION = re.compile(r"(\s*(?:else)?if )(.*?)( then\b.*)")


def lua_mutants(path: str, source: str) -> list[Mutant]:
    """Every mutant of the script, in the order of its lines."""
    lines = source.splitlines()
    found = []
    for index, line in enumerate(lines):
        for operator, changed in [*_tokens_changed(line), *_line_changed(line)]:
            after = "\n".join([*lines[:index], changed, *lines[index + 1 :]]) + "\n"
            found.append(Mutant(path=path, operator=operator, before=source, after=after))
    return found


def _tokens_changed(line: str) -> Iterator[tuple[str, str]]:
    for token in TOKEN.finditer(line):
        if change := _changed(str(token.lastgroup), token.group()):
            operator, text = change
            yield operator, line[: token.start()] + text + line[token.end() :]


def _changed(kind: str, text: str) -> tuple[str, str] | None:
    if kind == "number":
        return "off_by_one", str(int(text) + 1)
    if kind == "key" and text[2:] in INDEX:
        return "constant", f"K.{INDEX[(INDEX.index(text[2:]) + 1) % len(INDEX)]}"
    if kind == "operator" and text in FLIPPED:
        return "comparison", FLIPPED[text]
    if kind == "operator" and text in SIGNS:
        return "arithmetic", SIGNS[text]
    if kind == "name" and text in LOGIC:
        return "logic" if text in ("and", "or") else "constant", LOGIC[text]
    return None


def _line_changed(line: str) -> Iterator[tuple[str, str]]:
    if ONE_CALL.fullmatch(line):
        yield "removed", "-- removed"
    if found := CONDITION.fullmatch(line):
        yield "condition", f"{found[1]}not ({found[2]}){found[3]}"
