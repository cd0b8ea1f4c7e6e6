"""The pages: links resolve, commands and examples work, and docs/paper.md names functions and tests that exist."""

from __future__ import annotations

import ast
import re
import shlex
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from bapo.cli.app import app
from bapo.cli.document import document
from bapo.config.layers import preset_names
from bapo.tasks.base import make_prompt
from bapo.tasks.registry import load_task
from bapo.tasks.rewards import load_reward

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "deploy/README.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
EXAMPLES = [ROOT / "README.md", ROOT / "docs" / "your_task.md"]


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for language, text in FENCE.findall(page.read_text()) if language in languages]


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def bapo_lines(page: Path) -> list[str]:
    """What a reader types after `bapo`, without prompt signs, variables and comments."""
    indented = re.findall(r"^ {4}( *\S.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    lines = re.sub(r"\s*\\\n\s*", " ", "\n".join(blocks(page, "", "sh") + indented)).splitlines()
    found = [re.match(r"(?:\$ )?(?:\w+=\S+ )*bapo (.*)", re.split(r"\s{2,}#? ?| > ", line)[0]) for line in lines]
    return [match[1] for match in found if match]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_resolve_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


def examples_of_help(command: Any) -> list[str]:
    """What a reader of `--help` types after `bapo`."""
    inner = [line for part in getattr(command, "commands", {}).values() for line in examples_of_help(part)]
    text = re.sub(r"\s*\\\n\s*", " ", (command.help or "").partition("Examples:")[2])
    return inner + re.findall(r"^\s*bapo (.*?)(?: > .*)?$", text, re.MULTILINE)


SHOWN = [(page.name, line) for page in PAGES for line in bapo_lines(page)]
SHOWN += [("--help", line) for line in examples_of_help(typer.main.get_command(app))]


@pytest.mark.parametrize(("page", "line"), SHOWN)
def test_the_command_line_accepts_what_a_page_shows(page: str, line: str) -> None:
    command: Any = typer.main.get_command(app)
    words, context = shlex.split(line, comments=True), click.Context(command)
    while hasattr(command, "resolve_command"):
        name, command, words = command.resolve_command(context, words)
        context = click.Context(command, parent=context, info_name=name)
    assert command.make_context(context.info_name, list(words), **command.context_settings)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_examples_are_valid(page: Path) -> None:
    for text in blocks(page, "python"):
        ast.parse(text)
    for text in blocks(page, "toml"):
        tomllib.loads(text)


def test_the_agent_of_the_page_is_the_example_that_runs() -> None:
    example = (ROOT / "examples" / "agents" / "agent.py").read_text().partition("\n\n")[2].strip()
    assert f"```python\n# agent.py\n{example}\n```" in (ROOT / "docs" / "agents.md").read_text()


def test_the_pages_are_short_enough_to_be_read() -> None:
    assert sum(page.stat().st_size for page in (ROOT / "docs").glob("*.md")) <= 270_000, "say each thing once"


def test_the_page_of_commands_is_current() -> None:
    assert (ROOT / "docs" / "cli.md").read_text() == document(), "run python -m bapo.cli.document"


@pytest.mark.parametrize("text", blocks(ROOT / "docs" / "api.md", "python"), ids=lambda text: text.split("\n")[0])
def test_examples_of_the_api_run(text: str) -> None:
    exec(compile(text, "docs/api.md", "exec"), {})


def test_numbers_of_the_readme_are_those_of_the_results() -> None:
    """Each number with an interval or a decimal point in its table is in docs/results.md or docs/buffer.md."""
    table = (ROOT / "README.md").read_text().partition("| question | answer |")[2].partition("##")[0]
    evidence = "".join((ROOT / "docs" / name).read_text() for name in ("results.md", "buffer.md", "reliability.md"))
    numbers = re.findall(r"[+-]?\d+\.\d+(?: \[[^]]+\])?", table)
    assert len(numbers) > 12
    assert [number for number in numbers if number.lstrip("+") not in evidence] == []


def test_rewards_and_tasks_of_the_pages_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    for text in blocks(EXAMPLES[0], "python") + blocks(EXAMPLES[1], "python"):
        with (tmp_path / text.split()[1]).open("a") as file:
            file.write(text)
    lines = "\n".join(bapo_lines(EXAMPLES[0]) + bapo_lines(EXAMPLES[1]))
    right, wrong = (make_prompt("sums", "1+1=", {"answer": answer}) for answer in ("2", "3"))
    for name in set(re.findall(r"reward test (\S+)", lines)):
        reward = load_reward(name)
        assert (*reward(right, ["2"]), *reward(wrong, ["2"])) == (1.0, 0.0), name
    assert load_task("my_tasks.py:Sums", {}).prompts("test")[3].text == "3+3="


def test_every_preset_is_on_the_page_of_methods() -> None:
    named = set(re.findall(r"`([\w-]+)`", (ROOT / "docs" / "methods.md").read_text()))
    assert set(preset_names()) - named == set()


EQUATIONS = (ROOT / "docs" / "paper.md").read_text().partition("## Equations")[2].partition("## Decisions")[0]
ROWS = [line.strip("| ").split(" | ") for line in EQUATIONS.splitlines() if re.match(r"\| (?!paper)\w", line)]


@cache
def definitions(path: Path) -> frozenset[str]:
    """`function`, `Class` and `Class.method` of a module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return frozenset(found)


@cache
def names_of_tests() -> frozenset[str]:
    files = ROOT.glob("tests/**/test_*.py")
    return frozenset(
        name for path in files for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.M)
    )


def is_defined(dotted: str) -> bool:
    parts = dotted.split(".")
    modules = [(ROOT.joinpath(*parts[:n]).with_suffix(".py"), parts[n:]) for n in range(1, len(parts))]
    return any(path.exists() and ".".join(rest) in definitions(path) for path, rest in modules)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}: {row[1]}")
def test_every_equation_names_functions_and_tests_that_exist(row: list[str]) -> None:
    functions, tests = (re.findall(r"`([\w.]+)`", cell) for cell in row[2:4])
    module = functions[0].rpartition(".")[0]
    functions = [f"{module}{name}" if name.startswith(".") else name for name in functions]
    assert tests
    assert [name for name in functions if not is_defined(name)] == []
    assert set(tests) - names_of_tests() == set()
