"""Embeddings of prompts: what the learner writes is what a selector reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.runtime.run_directory.embeddings import embeddings_path, read_embeddings, write_embeddings
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.tasks.base import make_prompt
from bapo.tasks.registry import load_task
from learner.model.embeddings import embed, make_embeddings
from services.scheduler.proposals import make_pool
from tests.support.tiny_model import write_tiny_model

PROMPTS = [make_prompt("t", text, {}) for text in ("3,5,2->13:", "1:", "7,7,7,7->28:")]


def test_an_embedding_is_the_mean_hidden_state_of_the_prompt_alone_whatever_it_is_padded_with(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    found = embed(str(tmp_path / "model"), PROMPTS, torch.device("cpu"))
    with torch.no_grad():  # "1:" is the tokens 4 + 1 and, behind 200 integers and 9 symbols, ":"
        alone = model.model(torch.tensor([[5, 204 + "+-*/()=,:".index(":")]])).last_hidden_state[0].mean(0)
    assert found.shape == (3, 64)
    assert found[1].tolist() == pytest.approx(alone.tolist(), abs=1e-5)
    assert embed(str(tmp_path / "model"), PROMPTS[::-1], torch.device("cpu"))[::-1] == pytest.approx(found, abs=1e-5)


def dots_config(model: Path, **selector: object) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(model)},
            "algorithm": {"selector": "dots", "batch_size": 4},
            "learner": {"minibatch_size": 4, "device": "cpu"},
            "task": {"options": {"num_train": 30}},
            "selector": selector,
        }
    )


def test_the_learner_embeds_every_training_prompt_once_and_the_scheduler_finds_them(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    config, run = dots_config(tmp_path / "model"), RunDirectory.create(tmp_path / "run")
    make_embeddings(config, run)
    path = embeddings_path(config, run)
    written = path.stat().st_mtime_ns
    make_embeddings(config, run)
    assert path.stat().st_mtime_ns == written
    task = load_task("countdown", {"num_train": 30})
    prompts = task.prompts("train")
    pool = make_pool(config, run, task, prompts)
    assert pool.embed is not None
    assert pool.embed().shape == (30, 64)
    assert pool.levels is not None
    assert set(pool.levels.tolist()) == {3.0, 4.0}


@pytest.mark.parametrize(("rows", "levels"), [([3, 1], [3.0, 1.0]), ([3, "hard"], None), ([True, False], None)])
def test_a_dataset_has_levels_when_every_row_has_a_number_in_that_column(
    tmp_path: Path, rows: list[object], levels: list[float] | None
) -> None:
    path = tmp_path / "train.jsonl"
    lines = [{"prompt": f"p{i}", "answer": "a", "level": level} for i, level in enumerate(rows)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    task = load_task("dataset", {"path": str(path), "extra_columns": ["level"]})
    pool = make_pool(Config(), RunDirectory(tmp_path), task, task.prompts("train"))
    assert (None if pool.levels is None else pool.levels.tolist()) == levels


def test_rows_come_in_the_order_of_the_prompts_and_others_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "e.npz"
    write_embeddings(path, ["a", "b", "c"], np.array([[1, 1], [2, 2], [3, 3]], np.float32))
    assert read_embeddings(path, ["c", "a"]).tolist() == [[3, 3], [1, 1]]


def test_a_file_that_is_missing_broken_or_incomplete_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "e.npz"
    with pytest.raises(ConfigError, match=r"e\.npz"):
        read_embeddings(path, ["a"])
    path.write_bytes(b"no file of numpy")
    with pytest.raises(ConfigError, match=r"e\.npz"):
        read_embeddings(path, ["a"])
    write_embeddings(path, ["a"], np.array([[np.nan]], np.float32))
    with pytest.raises(ConfigError, match="example b"):
        read_embeddings(path, ["a", "b"])
    with pytest.raises(ConfigError, match="finite"):
        read_embeddings(path, ["a"])
    run = RunDirectory.create(tmp_path / "run")
    with pytest.raises(ConfigError, match="not found"):
        make_embeddings(dots_config(tmp_path, embeddings=str(tmp_path / "none.npz")), run)
