"""Every prompt as tokens, before a start: length and vocabulary, by the tokenizer of 218 words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.launcher.doctor.prompt_checks import prompts, tokenizer_files
from services.launcher.doctor.situation import Situation
from tests.support.launcher_config import make_config
from tests.support.tiny_model import VOCAB_SIZE, write_tokenizer

NUM_ROWS = 50


def _situation(tmp_path: Path, texts: list[str], *, limit: int = 8, vocab_size: int = VOCAB_SIZE) -> Situation:
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in texts))
    sections: dict[str, Any] = {
        "task": {"name": "dataset", "options": {"path": str(data)}},
        "rollout": {"port": 0, "max_prompt_tokens": limit},
    }
    config = make_config(tmp_path, **{"task": sections["task"], "rollout": sections["rollout"]})
    model = Path(config.model.path)
    (model / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    write_tokenizer(model)
    return Situation(config=config)


def _texts(*last: str) -> list[str]:
    return [*(f"{i}+{i}" for i in range(NUM_ROWS)), *last]


def test_prompts_whose_words_the_tokenizer_does_not_have_are_refused(tmp_path: Path) -> None:
    _, check = prompts(_situation(tmp_path, ["what", "whom", "when", "1+1"]))
    assert check.status == "fail"
    assert "to '<unk><unk><unk><unk>' (3 of 4 tested prompts" in check.detail
    assert [check.status for check in prompts(_situation(tmp_path, ["what", *_texts()]))] == ["ok"]


def test_prompts_that_fit_are_sound(tmp_path: Path) -> None:
    (check,) = prompts(_situation(tmp_path, _texts()))
    assert (check.status, check.detail) == ("ok", "50 checked; the longest has 3 of 8 tokens")


def test_a_long_prompt_at_the_end_of_the_file_is_refused_with_its_row_and_length(tmp_path: Path) -> None:
    (check,) = prompts(_situation(tmp_path, _texts("1+1+1+1+1", "1+1+1+1+1+1")))
    assert check.status == "fail"
    for part in ("2 of 52 prompts", "max_prompt_tokens = 8", "11 tokens", "train.jsonl row 52", "set it to 11"):
        assert part in check.detail


def test_a_token_without_an_embedding_is_refused(tmp_path: Path) -> None:
    # Words follow four special tokens, so 49 is id 53, and `+` 204.
    (check,) = prompts(_situation(tmp_path, _texts(), vocab_size=204))
    assert (check.status, "such as id 204 of 204" in check.detail) == ("fail", True)
    assert "50 of 50 prompts" in check.detail


def test_what_was_not_checked_in_time_is_said(tmp_path: Path) -> None:
    situation = _situation(tmp_path, _texts())
    situation.seconds = 0.0
    (check,) = prompts(situation)
    assert check.detail.startswith("the 1 longest of 50 (time is up) checked")


def test_a_resumed_run_is_only_told_of_a_long_prompt(tmp_path: Path) -> None:
    situation = _situation(tmp_path, _texts(), limit=2)
    situation.is_resumed = True
    assert [check.status for check in prompts(situation)] == ["warn"]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_model_without_its_tokenizer_is_refused(tmp_path: Path, name: str) -> None:
    situation = _situation(tmp_path, _texts())
    assert list(tokenizer_files(situation)) == []
    (Path(situation.config.model.path) / name).unlink()
    (check,) = tokenizer_files(situation)
    assert (check.status, name in check.detail) == ("fail", True)
