"""What a user sees of a run: the live table at two widths, plain lines, who waits for whom, the summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bapo.config.tree import Config
from bapo.runtime.auth.api_tokens import TOKEN, TOKEN_FILE, FileToken, Keyring, Role
from bapo.runtime.auth.token_store import TokenSet
from bapo.runtime.run_directory.layout import RunDirectory
from services.launcher.display.snapshot import Observer
from tests.support.buffer import new_store
from tests.support.buffer_app import serving, small_config


def make_row(step: int, **fields: Any) -> dict[str, Any]:
    row = {
        "step": step, "reward_mean": 0.25, "x1": 18, "x2": 2, "x3": 6, "num_bad": 31, "num_high": 44,
        "staleness_x1_max": 2, "staleness_x2_max": 0, "staleness_x3_max": 4, "tokens_per_s": 3912.0, "step_s": 1.83,
        "wait_batch_s": 0.71, "time": 1000.0 + 2 * step, "batch_size": 32,
    }  # fmt: skip
    return row | fields


def make_evaluation(split: str, version: int, accuracy: float, **fields: Any) -> dict[str, Any]:
    row = {
        "split": split, "version": version, "step": version - 1, "accuracy": accuracy, "low": accuracy - 0.02,
        "high": accuracy + 0.02, "num_prompts": 200, "num_samples": 2, "truncated_share": 0.25, "mean_tokens": 60.0,
        "seconds": 20.0, "rewards": {},
    }  # fmt: skip
    return row | fields


def test_the_observer_reads_records_and_survives_services_that_do_not_answer(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    observer = Observer(Config(), run)
    observer.watch(buffer_url="http://127.0.0.1:9", fleet_url="http://127.0.0.1:9")
    assert (observer.look().step, observer.look().left_s) == (0, None)
    run.append_metrics(make_row(1))
    run.append_evaluation(make_evaluation("cd34", 1, 0.5, rewards={"p": [1.0]}))
    snapshot = observer.look()
    assert (snapshot.step, snapshot.status, snapshot.workers) == (1, None, ())


def test_the_observer_goes_on_with_the_token_that_took_the_place_of_its_own(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an answer nothing seems to move, which ends a run where `stall_ends_run` is set."""
    for name in (TOKEN, TOKEN_FILE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("services.launcher.display.snapshot.SERVICE_EVERY_S", 0.0)
    monkeypatch.setattr("bapo.runtime.auth.api_tokens.LOOK_AGAIN_S", 0.0)
    run, made = RunDirectory.create(tmp_path / "run"), TokenSet(tmp_path / "run" / "tokens")
    made.create()
    observer = Observer(Config(), run)
    with serving(new_store(redis_url), small_config(), Keyring(path=made.accepted_path)) as client:
        observer.watch(buffer_url=client.url)
        assert (observer.look().silence, observer.look().is_denied) == ("", False)
        made.rotate(Role.OPERATOR)
        made.retire(Role.OPERATOR)
        assert observer.look().silence == ""


def test_the_observer_says_that_its_token_is_refused(redis_url: str, tmp_path: Path) -> None:
    run, ours, theirs = (RunDirectory.create(tmp_path / "run"), *(TokenSet(tmp_path / name) for name in ("a", "b")))
    for tokens in (ours, theirs):
        tokens.create()
    observer = Observer(Config(), run, FileToken(ours.path_of(Role.OPERATOR)))
    with serving(new_store(redis_url), small_config(), Keyring(path=theirs.accepted_path)) as client:
        observer.watch(buffer_url=client.url)
        snapshot = observer.look()
    assert snapshot.is_denied
    assert "this token is not accepted here" in snapshot.silence
