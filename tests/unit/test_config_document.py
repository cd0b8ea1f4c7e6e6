"""The manual is the code: docs/configuration.md is current, and every key has a docstring."""

from __future__ import annotations

from pathlib import Path

from bapo.config.document import document

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == document(), "run: python -m bapo.config.document"
