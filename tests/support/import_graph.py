"""What a module imports, read from its source and without running it: at its start, and by any of its functions.

Followed: import statements, import_module and its relatives with a name that can be read, strings that name a module of
ours (`python -m`, Ray's and vLLM's paths to classes), and packages whose modules are loaded by name (`__package__`, a
string that names a package, an f-string that begins with one).
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path

LOADERS = {"import_module", "__import__", "resolve_name", "run_module"}
"""Functions of importlib, builtins, pkgutil and runpy that import what their first argument names."""


@dataclass(frozen=True, slots=True)
class Import:
    """One name that is imported."""

    name: str
    """Dotted; of a module, or of something in one."""
    where: str
    """file:line."""
    is_at_start: bool
    """Whether importing the file imports it, so that a process cannot start without it."""


@dataclass(frozen=True, slots=True)
class Reached:
    """What a process can import."""

    own: frozenset[str]
    """Modules of ours, also those that are not there."""
    foreign: Mapping[str, str]
    """Dotted name of what others wrote, without the standard library -> where it is imported first."""
    unreadable: frozenset[str]
    """file:line of imports by a name that only a running process knows."""


@dataclass(frozen=True, eq=False)
class ImportGraph:
    """The sources of some packages that lie in one folder."""

    root: Path
    packages: Sequence[str]
    not_followed: frozenset[str] = frozenset()
    """Packages that a string may name without an import where they are not installed."""
    _read: dict[str, FileImports] = field(default_factory=dict)

    @cache  # noqa: B019 - one graph lives as long as the tests
    def reach(self, entry: str, *, starts_only: bool = False) -> Reached:
        """All that `python -m ENTRY` can import; with `starts_only`, what it imports before its first statement."""
        if not self.is_own(entry):
            return Reached(own=frozenset(), foreign={entry: "its command"}, unreadable=frozenset())
        waiting, own, foreign, unreadable = [*self._entry(entry)], set[str](), dict[str, str](), set[str]()
        while waiting:
            module = waiting.pop()
            if module in own:
                continue
            own.add(module)
            if (found := self._imports(module)) is None:
                continue
            unreadable |= set(found.unreadable)
            for each in found.imports:
                if starts_only and not each.is_at_start:
                    continue
                if self.is_own(each.name):
                    waiting += self._modules(each.name)
                elif each.name.partition(".")[0] not in sys.stdlib_module_names:
                    foreign.setdefault(each.name, each.where)
        return Reached(own=frozenset(own), foreign=foreign, unreadable=frozenset(unreadable))

    def is_own(self, name: str) -> bool:
        """Whether it belongs to one of the packages."""
        return name.partition(".")[0] in self.packages

    @cache  # noqa: B019 - as above
    def file_of(self, module: str) -> Path | None:
        """Its source; None if there is no such module."""
        path = self.root.joinpath(*module.split("."))
        found = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        return found if found.is_file() else None

    def _entry(self, entry: str) -> Iterator[str]:
        yield from self._modules(entry)
        if self.file_of(main := f"{entry}.__main__"):
            yield main

    @cache  # noqa: B019 - as above
    def _modules(self, name: str) -> list[str]:
        """The module, and the packages around it, which are imported before; `a.b.*` is every module of a.b."""
        package, _, last = name.rpartition(".")
        if last == "*":
            folder = self.root.joinpath(*package.split("."))
            files = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
            inner = [path.parent.name for path in folder.glob("*/__init__.py")]
            return [*self._modules(package), *(f"{package}.{module}" for module in [*files, *inner])]
        parts = name.split(".")
        found = [".".join(parts[: length + 1]) for length in range(len(parts))]
        return [module for module in found if self.file_of(module)] or found[:1]

    def _imports(self, module: str) -> FileImports | None:
        path = self.file_of(module)
        if path is None:
            return None
        if module not in self._read:
            self._read[module] = FileImports(self, module, path)
        return self._read[module]


class FileImports:
    """Imports of one file."""

    def __init__(self, graph: ImportGraph, module: str, path: Path) -> None:
        self._graph, self._module = graph, module
        self._package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        self._place = str(path.relative_to(graph.root))
        self.imports: list[Import] = []
        self.unreadable: list[str] = []
        self._loaders: set[str] = set(LOADERS)
        self._constants: dict[str, list[str]] = {}
        self._prose: set[int] = set()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        self._survey(ast.walk(tree))
        self._visit(tree, is_at_start=True)

    def _visit(self, node: ast.AST, *, is_at_start: bool) -> None:
        match node:
            case ast.If(orelse=others, test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                self._visit_all(others, is_at_start=is_at_start)
                return
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                is_at_start = False
            case ast.Try(handlers=handlers) if any(map(_catches_import_error, handlers)):
                self._visit_all(node.body, is_at_start=False)
                self._visit_all([*handlers, *node.orelse, *node.finalbody], is_at_start=is_at_start)
                return
            case ast.With(items=items) if any("ImportError" in ast.unparse(item) for item in items):
                is_at_start = False  # suppress(ImportError)
        self._note(node, is_at_start=is_at_start)
        self._visit_all(ast.iter_child_nodes(node), is_at_start=is_at_start)

    def _note(self, node: ast.AST, *, is_at_start: bool) -> None:
        """What this node imports itself."""
        match node:
            case ast.Import(names=names):
                self._add([name.name for name in names], node, is_at_start=is_at_start)
            case ast.ImportFrom(names=names):
                base = self._base(node)
                self._add([f"{base}.{name.name}" for name in names], node, is_at_start=is_at_start)
            case ast.Call(func=function) if _last_name(function) in self._loaders:
                self._add_call(node, is_at_start=is_at_start)
            case ast.Constant(value=str(text)) if id(node) not in self._prose:
                self._add(self._named(text), node, is_at_start=False)
            case ast.Name(id="__package__"):
                self._add([f"{self._package}.*"], node, is_at_start=False)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                self._add(list(self._started(items)), node, is_at_start=False)

    def _visit_all(self, nodes: Iterable[ast.AST], *, is_at_start: bool) -> None:
        for node in nodes:
            self._visit(node, is_at_start=is_at_start)

    def _add(self, names: Sequence[str], node: ast.stmt | ast.expr, *, is_at_start: bool) -> None:
        where = f"{self._place}:{node.lineno}"
        self.imports += [Import(name=name, where=where, is_at_start=is_at_start) for name in names]

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return str(node.module)
        parts = self._package.split(".")
        return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])

    def _add_call(self, node: ast.Call, *, is_at_start: bool) -> None:
        """`import_module(NAME)`, where NAME is a string, a constant of the file, or an f-string with a known begin."""
        given = [*node.args, *(word.value for word in node.keywords if word.arg in ("name", "mod_name"))]
        names = self._values(given[0]) if given else []
        if not names:
            self.unreadable.append(f"{self._place}:{node.lineno}")
        self._add([name.partition(":")[0] for name in names], node, is_at_start=is_at_start)

    def _values(self, node: ast.expr) -> list[str]:
        match node:
            case ast.Constant(value=str(text)):
                return [self._package + text if text.startswith(".") else text]
            case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]) if "." in text:
                package = text.rpartition(".")[0]
                return [f"{package}.*" if self._graph.is_own(package) else package]
            case ast.Name(id=name):
                return self._constants.get(name, [])
        return []

    def _named(self, text: str) -> list[str]:
        """Modules of ours that a string names: of `a.b.Class` and `a.b:name` a.b; of a package all modules."""
        name = re.split(r"[:\s]", text, maxsplit=1)[0].rstrip(".")
        if name in self._graph.not_followed:
            return []
        if "." not in name or not self._graph.is_own(name) or not re.fullmatch(r"\w+(\.\w+)+", name):
            return []
        while self._graph.file_of(name) is None and "." in name:
            name = name.rpartition(".")[0]
        path = self._graph.file_of(name)
        if path is None or "." not in name:
            return []
        return [f"{name}.*" if path.name == "__init__.py" else name]

    def _started(self, items: Sequence[ast.expr]) -> Iterator[str]:
        """Modules of `[python, "-m", NAME]`, which are processes of their own."""
        for flag, name in pairwise(items):
            if isinstance(flag, ast.Constant) and flag.value == "-m":
                values = self._values(name)
                if not values:
                    self.unreadable.append(f"{self._place}:{name.lineno}")
                yield from values
                yield from (f"{value}.__main__" for value in values)

    def _survey(self, nodes: Iterable[ast.AST]) -> None:
        """Note what a name can mean anywhere in the file: other names of loaders, constants, strings that are prose."""
        for node in nodes:
            match node:
                case ast.ImportFrom(names=names):
                    self._loaders |= {name.asname for name in names if name.name in LOADERS and name.asname}
                case ast.Expr(value=ast.Constant() as text):
                    self._prose.add(id(text))
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                    | ast.For(target=ast.Name(id=name), iter=value)
                    | ast.comprehension(target=ast.Name(id=name), iter=value)
                ):
                    items = value.elts if isinstance(value, ast.Tuple | ast.List | ast.Set) else [value]
                    texts = [item.value for item in items if isinstance(item, ast.Constant)]
                    if len(texts) == len(items):
                        self._constants.setdefault(name, []).extend(text for text in texts if isinstance(text, str))


def _catches_import_error(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or "ImportError" in (said := ast.unparse(handler.type)) or "NotFoundError" in said


def _last_name(function: ast.expr) -> str:
    """`import_module` of `importlib.import_module`."""
    match function:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""
