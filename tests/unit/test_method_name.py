"""A run is called by its preset, also with settings on top and when resumed; without one, by its composer."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo.config.learner import SftConfig
from bapo.config.load import dump_toml, load_config, load_resolved
from bapo.config.tree import Config
from services.dashboard.endpoints import view_of
from services.dashboard.overview import about
from tests.support.synthetic_runs import write_run


@pytest.mark.parametrize(
    ("files", "overrides", "name"),
    [
        (["bapo-reuse"], [], "bapo-reuse"),
        (["bapo-reuse"], ["--algorithm.high_window", "2", "--learner.lr", "1e-5"], "bapo-reuse"),
        (["mopps"], [], "mopps"),
        ([], [], "bapo"),
        ([], ["--algorithm.composer", "grpo", "--algorithm.online_filter", "none"], "grpo"),
    ],
)
def test_the_method_is_the_preset_also_after_a_resume(
    files: list[str], overrides: list[str], name: str, tmp_path: Path
) -> None:
    config = load_config(files, overrides)
    (tmp_path / "config.toml").write_text(dump_toml(config))
    assert (config.method, load_resolved(tmp_path / "config.toml").method) == (name, name)


@pytest.mark.parametrize(
    ("preset", "c1", "window"),
    [("bapo", 0.125, True), ("bapo-reuse", None, False), ("bapo-without-x3", 0.125, False), ("grpo", None, False),
     ("popo", None, False), ("bapo-mini", 0.0, True), ("remix", None, False)],
)  # fmt: skip
def test_the_page_has_thresholds_only_where_they_decide(
    preset: str, c1: float | None, window: bool, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "mine", preset=preset)
    found = about(view_of(run, load_resolved(run.config_path)))
    assert (found["c1"], found["has_window"]) == (c1, window)


def test_the_page_of_supervised_fine_tuning_names_its_data(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine", preset="grpo")
    config = load_resolved(run.config_path).model_copy(update={"sft": SftConfig(data="chats.jsonl")})
    found = about(view_of(run, config))
    assert (found["method"], found["task"]) == ("supervised fine-tuning", "chats.jsonl")


def test_a_config_without_a_record_of_its_preset_is_named_by_its_composer() -> None:
    assert Config().method == "bapo"
