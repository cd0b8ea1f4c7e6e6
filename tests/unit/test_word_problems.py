"""Problems of the demo of mathematics: the files are what their script writes, and none is taught."""

from __future__ import annotations

import json
import random
import re
from itertools import islice
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from models.tokenizer import check_round_trips
from models.train_math_model import ROUND_TRIPS
from models.word_problems import HELD_OUT, TAUGHT, TRAINED, WORD_PATTERN, examples, problems, vocabulary, write
from tests.support.tasks import maker

make_task = maker("mathematics")

DATA = Path(__file__).parents[2] / "examples" / "mathematics"


def test_the_files_are_what_the_script_writes(tmp_path: Path) -> None:
    write(tmp_path)
    for name, number in (("train", 1500), ("words", 400), ("latex", 400)):
        text = (tmp_path / f"{name}.jsonl").read_text()
        assert text == (DATA / f"{name}.jsonl").read_text()
        assert len(text.splitlines()) == number


def test_every_solution_is_right_and_its_steps_are_true() -> None:
    task = make_task(path=str(DATA / "train.jsonl"), held_out={"words": str(DATA / "words.jsonl")}, chat=False)
    for split in ("train", "words"):
        for prompt in task.prompts(split):
            gold = task.gold(prompt)
            assert gold is not None
            assert task.reward(prompt, gold) == 1.0
    for line in (DATA / "words.jsonl").read_text().splitlines():
        *steps, boxed = json.loads(line)["solution"].split(";")
        for step in steps:
            left, right = step.split("=")
            assert eval(left) == int(right)
        assert boxed == f"\\boxed{{{right}}}"


def test_problems_that_are_taught_trained_and_held_out_differ() -> None:
    rng = random.Random(1)
    seen = [{(p.kind, p.numbers) for p in islice(problems(rng, b), 300)} for b in (TAUGHT, TRAINED, HELD_OUT)]
    assert not seen[0] & seen[1]
    assert not seen[1] & seen[2]
    assert not seen[0] & seen[2]


def test_every_token_of_what_is_taught_and_asked_is_in_the_vocabulary() -> None:
    known = set(vocabulary())
    texts = [prompt + response for prompt, response in islice(examples(random.Random(2)), 3000)]
    texts += [json.loads(line)["problem"] for file in DATA.glob("*.jsonl") for line in file.read_text().splitlines()]
    assert {word for text in texts for word in re.findall(WORD_PATTERN, text)} <= known
    assert len(known) < 300


def test_the_shipped_model_is_small_and_reads_the_problems_word_by_word() -> None:
    folder = Path(__file__).parents[2] / "models" / "math-tiny"
    check_round_trips(folder, ROUND_TRIPS)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 3_000_000
