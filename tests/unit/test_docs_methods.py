"""docs/methods.md tells the truth: its settings load, its files and decisions exist, and no loss is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bapo.algorithms.registry import composer_names
from bapo.config.layers import preset_names
from bapo.config.load import load_config
from learner.losses.registry import load_loss, loss_names

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
SETTINGS = dict(re.findall(r"```toml\n# (\w+)\n(.*?)```", TEXT, re.DOTALL))


@pytest.mark.parametrize("method", SETTINGS)
def test_the_settings_of_a_method_load_on_top_of_grpo(method: str, tmp_path: Path) -> None:
    file = tmp_path / "method.toml"
    file.write_text(f'preset = "grpo"\n{SETTINGS[method]}')
    config = load_config([file], [])
    load_loss(config.loss)
    assert config.loss != load_config(["grpo"], []).loss


@pytest.mark.parametrize("method", SETTINGS)
def test_the_preset_of_a_method_has_the_loss_that_the_page_shows(method: str, tmp_path: Path) -> None:
    file = tmp_path / "method.toml"
    file.write_text(f'preset = "grpo"\n{SETTINGS[method]}')
    preset = {"dots": "dots-replay"}.get(method, method)
    assert load_config([file], []).loss == load_config([preset], []).loss


def test_every_composer_is_on_the_page_with_a_preset() -> None:
    rows = TEXT.partition("## Composers")[2].partition("## Prompt selectors")[0]
    assert all(f"| `{name}` |" in rows for name in composer_names())
    assert composer_names() == tuple(sorted({load_config([name], []).algorithm.name for name in preset_names()}))


def test_every_loss_has_a_preset_or_settings_on_the_page() -> None:
    shown = {load_config([name], []).loss.name for name in preset_names() if f"`{name}`" in TEXT}
    shown |= {re.search(r'name = "(\w+)"', text).group(1) for text in SETTINGS.values() if 'name = "' in text}  # type: ignore[union-attr]
    assert shown == set(loss_names())


def test_every_preset_and_file_that_the_page_names_exists() -> None:
    rows = [line.split(" | ")[0] for line in TEXT.splitlines() if line.startswith("| `") and "arXiv" in line]
    named = {name for row in rows for name in re.findall(r"`([\w-]+)`", row)}
    assert len(named) > 5
    assert named <= set(preset_names())
    for path in re.findall(r"`((?:bapo|learner|tests)/[\w/]+\.py)`", TEXT) + re.findall(r"\((adr/[\w-]+\.md)\)", TEXT):
        assert (ROOT / path).exists() or (ROOT / "docs" / path).exists(), path
