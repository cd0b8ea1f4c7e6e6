"""docs/paper.md and docs/adr tell the truth: every function, test and decision that they name exists."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

from bapo.comparison import rescue_tables as rescues_of
from bapo.comparison import tables as tables_of
from bapo.comparison.catalogue import CATALOGUE
from tests.vectors import vector

ROOT = Path(__file__).parents[2]
ADRS = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
PACKAGES = ("bapo", "buffer_service", "rollout_server", "learner", "services")
DOTTED = re.compile(rf"`((?:{'|'.join(PACKAGES)})(?:\.\w+)+)`")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows_of(text: str, first: str) -> list[list[str]]:
    """The cells of each row, without the headers, which begin with `first`."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(f"| {first} ")]
    return [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in lines]


PLACES, _, CLAIMED = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8").partition("## The paper's claims")
ROWS, CLAIMS = rows_of(PLACES, "paper"), rows_of(CLAIMED, "claim")


@cache
def names_in(path: Path) -> frozenset[str]:
    """Dotted names that a module defines: functions, classes, their methods, constants."""
    return frozenset(_definitions(ast.parse(path.read_text(encoding="utf-8")).body, ""))


def _definitions(body: list[ast.stmt], prefix: str) -> list[str]:
    found: list[str] = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.append(prefix + node.name)
        if isinstance(node, ast.ClassDef):
            found += _definitions(node.body, f"{prefix}{node.name}.")
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.append(prefix + node.target.id)
    return found


def is_defined(dotted: str) -> bool:
    """Whether `package.module.Name.method`, `package.module.name` or a module of this name exists."""
    parts = dotted.split(".")
    for n in range(len(parts), 0, -1):
        module = ROOT.joinpath(*parts[:n])
        if n == len(parts) and (module.is_dir() or module.with_suffix(".py").exists()):
            return True
        if module.with_suffix(".py").exists():
            return ".".join(parts[n:]) in names_in(module.with_suffix(".py"))
    return False


def test_the_table_has_its_rows() -> None:
    assert len(ROWS) > 40
    for equation in range(1, 14):
        assert any(re.search(rf"Eqs?\. (\d+, )*{equation}\b", row[0]) for row in ROWS), f"Eq. {equation} has no row"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}: {row[1]}")
def test_every_row_names_functions_and_tests_that_exist(row: list[str]) -> None:
    functions, tests = DOTTED.findall(row[2]), TEST.findall(row[3])
    assert functions, f"no function: {row}"
    assert tests, f"no test: {row}"
    assert [name for name in functions if not is_defined(name)] == []
    assert [f"{file}::{name}" for file, name in tests if name not in names_in(ROOT / file)] == []


def test_every_claim_names_a_table_or_a_figure_that_reports_have() -> None:
    figures = {entry.number for entry in CATALOGUE if entry.number not in (2, 3)}  # drawings, not of runs
    tables = set(
        re.findall(r'key="([\w-]+)"', "".join(inspect.getsource(module) for module in (tables_of, rescues_of)))
    )
    shown_tables: set[str] = set()
    shown_figures: set[int] = set()
    for claim, *_, ours, _ in CLAIMS:
        found = set(re.findall(r"`([\w-]+)`", ours)) & tables
        numbers = {int(n) for part in re.findall(r"figures? ([\d, ]+)", ours) for n in re.findall(r"\d+", part)}
        assert found or numbers or "theory.md" in ours, claim
        assert numbers <= figures, claim
        shown_tables |= found
        shown_figures |= numbers
    assert len(CLAIMS) > 15
    assert tables - shown_tables == {"settings"}
    assert figures - shown_figures == {1, 4, 12}, "curves of what other figures show the end of"


def test_the_claims_quote_the_numbers_that_the_papers_tables_give() -> None:
    gains, times = vector("V21.gains_rel_pct"), vector("V21.time_ratio_vs_grpo")
    quoted = "\n".join(row[1] for row in CLAIMS)
    for number in (f"{gains['mean3']:.1f} %", f"{gains['mean5']:.1f} %", f"{gains['mean_abs5']:.2f} points"):
        assert number in quoted
    for key in ("woX2_plan", "woX2_vis", "woX3_plan", "woX3_vis"):
        assert f"{gains[key]:.1f} %" in quoted, key
    for key in ("dapo_over_bapo", "dapo_over_grpo"):
        assert f"x{gains[key]:.2f}" in quoted, key
    assert f"x{gains['bapo_over_grpo']:.3f}" in quoted
    assert all(f"x{ratio:.2f}" in quoted for ratios in times.values() for ratio in ratios.values())


def test_every_decision_that_a_row_names_exists() -> None:
    known = {path.name[:4] for path in ADRS}
    named = {number for row in ROWS for number in re.findall(r"\d{4}", row[4] if len(row) > 4 else "")}
    assert named <= known


def test_every_decision_that_code_or_settings_name_exists() -> None:
    known = {path.name[:4] for path in ADRS}
    files = [
        path
        for package in PACKAGES
        for pattern in ("*.py", "*.toml", "*.lua")
        for path in (ROOT / package).rglob(pattern)
    ]
    named = {
        (number, str(path.relative_to(ROOT)))
        for path in files
        for numbers in re.findall(r"ADRs? ((?:\d{4}(?:, | and )?)+)", path.read_text(encoding="utf-8"))
        for number in re.findall(r"\d{4}", numbers)
    }
    assert len(named) > 10
    assert {place for place in named if place[0] not in known} == set()


@pytest.mark.parametrize("path", ADRS, ids=lambda path: path.stem)
def test_a_decision_is_short_and_has_its_four_parts(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40
    assert text.startswith(f"# {path.name[:4]}. ")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Context", "Decision", "Consequence", "Equation"]
    assert f"({path.name})" in (ROOT / "docs" / "adr" / "README.md").read_text(encoding="utf-8")
    assert [name for name in DOTTED.findall(text) if not is_defined(name)] == []
