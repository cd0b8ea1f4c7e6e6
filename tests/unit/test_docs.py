"""Links of the pages lead to files, and the commands that they show exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from bapo.cli import app

PAGES = [Path("README.md"), *sorted(Path("docs").rglob("*.md"))]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    broken = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_commands_of_shell_blocks_exist(page: Path) -> None:
    shown = re.findall(r"^(?:\$ )?bapo ([a-z-]+)", page.read_text(), re.MULTILINE)
    assert set(shown) - {*COMMANDS} == set()
