"""What every preset promises: found in the folder, so that a new file is tested without an edit here."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from bapo.algorithms.registry import load_composer
from bapo.cli import app
from bapo.config.document import about_preset
from bapo.config.layers import preset_names
from bapo.config.load import dump_toml, load_config
from learner.losses.registry import load_loss


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_loads_names_a_composer_and_a_loss_and_says_where_it_comes_from(name: str) -> None:
    config = load_config([name], [])
    assert load_composer(config.algorithm).name == config.algorithm.name
    load_loss(config.loss)
    assert config.preset == name
    assert len(about_preset(name)) > 40


def test_the_papers_presets_are_there() -> None:
    assert {"bapo", "bapo-mini", "bapo-official", "grpo"} <= set(preset_names())


def test_the_command_lists_every_preset_with_its_first_sentence() -> None:
    result = CliRunner().invoke(app, ["config", "presets"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(preset_names())
    assert all(len(line.split()) > 3 for line in lines)


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_survives_the_way_into_a_run_directory(name: str, tmp_path: object) -> None:
    from pathlib import Path

    from bapo.config.load import load_resolved

    file = Path(str(tmp_path)) / "config.toml"
    config = load_config([name], [])
    file.write_text(dump_toml(config))
    assert load_resolved(file) == config
