"""docs/buffer.md says what is true: its invariants, its routes, its commands and its example exist."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from bapo.cli import app
from buffer_service.audit import INVARIANTS
from buffer_service.rights import ROUTES

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "buffer.md").read_text()


def test_every_invariant_is_on_the_page_and_no_other() -> None:
    table = PAGE.rpartition("| name | invariant |")[2]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(INVARIANTS)


def test_every_route_is_on_the_page() -> None:
    table = PAGE[PAGE.index("| route | who | what |") : PAGE.index("An error is")]
    named = " ".join(re.findall(r"`([^`]*)`", table))
    paths = [rule.path for rule in ROUTES]
    last = {path.rpartition("/")[2] if "{" not in path else path.split("/")[1] for path in paths}
    assert {word for word in last if word not in named} == {"metrics"}


def test_every_command_is_on_the_page() -> None:
    group = typer.main.get_command(app).commands["buffer"]  # type: ignore[attr-defined]
    for name in group.commands:
        assert f"bapo buffer {name}" in PAGE or f"**`{name} " in PAGE, name


def test_every_file_that_the_page_links_exists() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (REPOSITORY / "docs" / target).exists(), target
