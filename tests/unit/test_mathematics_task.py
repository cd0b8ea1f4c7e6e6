"""Task `mathematics`: which data it reads, what it asks, and what it says of files that are not there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bapo.config.load import load_config
from bapo.core.errors import ConfigError
from bapo.tasks.mathematics import HELD_OUT_SETS
from bapo.tasks.registry import load_task, task_of
from tests.support.tasks import maker

make_task = maker("mathematics")

ROOT = Path(__file__).parents[2]
DEEPSCALER = {"problem": "What is $1+1$?", "answer": "2", "solution": "It is $\\boxed{2}$."}


def _file(tmp_path: Path, name: str, *rows: Mapping[str, Any]) -> str:
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_each_file_has_the_columns_of_its_set(tmp_path: Path) -> None:
    held_out = {
        "aime24": _file(tmp_path, "aime24", {"id": 60, "problem": "a?", "answer": "204", "url": "..."}),
        "amc": _file(tmp_path, "amc", {"problem": "b?", "answer": 142.0}),
        "minerva": _file(tmp_path, "minerva", {"question": "c?", "answer": "4.5e33"}),
        "olympiad": _file(tmp_path, "olympiad", {"question": "d?", "final_answer": ["$2$"], "solution": ["So 2."]}),
    }
    task = load_task("mathematics", {"path": _file(tmp_path, "train", DEEPSCALER), "held_out": held_out, "chat": False})
    assert task.held_out_splits == ("aime24", "amc", "minerva", "olympiad")
    (prompt,) = task.prompts("train")
    assert prompt.text.startswith("What is $1+1$?\nPlease reason step by step")
    assert prompt.answer["answer"] == "2"
    (amc,), (minerva,), (olympiad,) = (task.prompts(split) for split in ("amc", "minerva", "olympiad"))
    assert task.reward(amc, "\\boxed{142}") == 1.0
    assert task.reward(minerva, "\\boxed{4.5\\times 10^{33}}") == 1.0
    assert task.gold(olympiad) == "\\boxed{$2$}"
    assert task.reward(olympiad, "\\boxed{2}") == 1.0


def test_a_held_out_problem_is_not_trained_however_its_answer_is_written(tmp_path: Path) -> None:
    train = _file(tmp_path, "train", DEEPSCALER, {"problem": "b?", "answer": "142"})
    task = make_task(
        path=train, held_out={"amc": _file(tmp_path, "amc", {"problem": "b?", "answer": 142.0})}, chat=False
    )
    assert [prompt.answer["answer"] for prompt in task.prompts("train")] == ["2"]


def test_files_that_are_not_there_are_named_all_together_with_where_they_come_from(tmp_path: Path) -> None:
    task = make_task(path="deepscaler.parquet", held_out={"aime24": "a.jsonl", "mine": "mine.jsonl"})
    with pytest.raises(ConfigError) as caught:
        task.prompts("train")
    said = str(caught.value)
    assert "deepscaler.parquet (train is agentica-org/DeepScaleR-Preview-Dataset:train" in said
    assert "a.jsonl (aime24 is HuggingFaceH4/aime_2024:train" in said
    assert "mine.jsonl not found" in said


def test_sets_by_name_come_from_the_hub_and_a_wrong_name_is_refused() -> None:
    assert make_task().held_out_splits == tuple(HELD_OUT_SETS) == ("aime24", "amc", "math500", "minerva", "olympiad")
    assert make_task(held_out=["amc"]).held_out_splits == ("amc",)
    with pytest.raises(ConfigError, match="there is no set 'amc23'"):
        make_task(held_out=["amc23"])


def test_the_configuration_for_gpus_is_table_3_and_measures_the_five_sets() -> None:
    config = load_config([str(ROOT / "deploy" / "configs" / "math-1.5b.toml")], [])
    algorithm, rollout, learner = config.algorithm, config.rollout, config.learner
    assert (algorithm.batch_size, algorithm.group_size, algorithm.capacity, algorithm.most_reevaluated) == (
        256, 8, 256, 128,
    )  # fmt: skip
    assert (rollout.max_prompt_tokens, rollout.max_response_tokens, rollout.temperature) == (2048, 8192, 1.0)
    assert (learner.lr, learner.minibatch_size, config.loss.kl_coef, config.loss.entropy_coef) == (1e-6, 64, 1e-3, 1e-3)
    assert (config.cadence.weight_sync_interval, config.cadence.reevaluation_interval, config.run.seed) == (5, 5, 42)
    task = task_of(config)
    config.evaluation.require_splits(task.held_out_splits, 1.0)
    samples = [config.evaluation.samples_of(split) for split in task.held_out_splits]
    assert samples == [32, 32, 4, 4, 4]


def test_the_demo_has_its_data_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(["deploy/configs/demo-mathematics.toml"], [])
    task = task_of(config)
    config.evaluation.require_splits(task.held_out_splits, 1.0)
    assert [len(task.prompts(split)) for split in ("train", "words", "latex")] == [1500, 400, 400]
