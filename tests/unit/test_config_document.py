"""The manual is the code: docs/configuration.md is current, and every key has a docstring."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from bapo.config.check import known_keys
from bapo.config.document import document
from bapo.config.tree import Config

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == document(), "run: python -m bapo.config.document"


def test_every_section_and_every_key_is_explained() -> None:
    sections = [field.annotation for field in Config.model_fields.values()]
    for section in sections:
        if isinstance(section, type) and issubclass(section, BaseModel):
            assert section.__doc__, section
            unexplained = [name for name, field in section.model_fields.items() if not field.description]
            assert not unexplained, f"{section.__name__}: {unexplained}"


def test_the_page_names_every_key() -> None:
    page = document()
    for key in known_keys():
        assert f"`{key.rpartition('.')[2]}`" in page, key


def test_a_row_shows_type_bounds_default_and_meaning() -> None:
    assert "| `batch_size` | int, >= 1 | `256` | B: fresh groups per step" in document()
    assert "| `dual_clip` | float or null, > 1 | `10.0` |" in document()
    assert "| `betas` | [float, float] | `[0.9, 0.999]` |" in document()
