"""docs/methods.md tells the truth: its settings load, its files and decisions exist, and no loss is missing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from bapo.algorithms.registry import composer_names
from bapo.algorithms.settings import AlgorithmConfig
from bapo.config.layers import flatten, preset_names
from bapo.config.load import load_config
from learner.losses.base import load_loss
from tests.loss_setup import loss_names

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


PIECES = {
    "S": r"algorithm\.selector|selector\.",
    "C": r"algorithm\.name",
    "A": r"loss\.advantage",
    "L": r"loss\.(?!advantage)",
    "R": r"shaping\.",
    "K": r"cadence\.|rollout\.generation_budget|learner\.(epochs|reset_optimizer)",
}
"""Letter of the page -> the settings that it stands for."""
ROWS = {
    preset: line.split(" | ")
    for line in TEXT.partition("### The methods")[2].partition("### Own improvements")[0].splitlines()
    if line.startswith("| `") and line.count(" | ") == 4
    for preset in re.findall(r"`([\w-]+)`", line.split(" | ")[0])
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_names_the_pieces_that_differ_from_grpo(name: str) -> None:
    base = dict(flatten(load_config(["grpo"], []).model_dump()))
    found = flatten(load_config([name], []).model_dump())
    changed = [".".join(key) for key, value in found if base[key] != value]
    letters = [letter for letter, keys in PIECES.items() if any(re.match(keys, key) for key in changed)]
    assert ROWS[name][3] == (" ".join(letters) or "-")


def test_a_preset_has_a_row_is_a_variant_of_bapo_or_an_improvement_of_our_own() -> None:
    variants = TEXT.partition("Variants of BAPO")[2].partition("How the window")[0]
    own = TEXT.partition("### Own improvements")[2].partition("### Losses of methods")[0]
    named = ROWS.keys() | set(re.findall(r"`(bapo-[\w-]+)`", variants)) | set(re.findall(r"\| `(bapo-\w+)` \|", own))
    assert named == set(preset_names())
    assert all("arXiv" in ROWS[name][2] for name in ("dapo", "mopps", "dots-replay", "repo", "arpo", "luffy", "relift"))


def test_the_page_says_which_presets_move_the_window_by_another_rule_than_eq_8() -> None:
    rows = TEXT.partition("| `algorithm.threshold_schedule` |")[2].partition("\n\n")[0]
    shown = dict(re.findall(r"\| `(\w+)` \|.*\| ([^|]*) \|", rows))
    assert shown.keys() == set(get_args(AlgorithmConfig.model_fields["threshold_schedule"].annotation))
    for schedule, cell in shown.items():
        if schedule != "eq8":
            of_bapo = {
                name for name in preset_names() if load_config([name], []).algorithm.threshold_schedule == schedule
            }
            assert set(re.findall(r"`([\w-]+)`", cell)) == of_bapo


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
