"""What every way to write a reward must keep. A new file in bapo/tasks/adapters is tested: it needs an example here."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo.core.errors import ConfigError
from bapo.tasks.base import make_prompt
from bapo.tasks.grading.answers import grade
from bapo.tasks.rewards import Verifier, load_reward

BODY = """
def one(text, answer):
    if text == "raise":
        raise ValueError("cannot read this")
    return None if text == "skip" else float(text == answer)
"""

EXAMPLES: dict[str, dict[str, str]] = {
    "plain": {
        "": "def f(prompt, text):\n    return one(text, prompt.answer['answer'])\n",
        "columns": "import bapo\n@bapo.reward\ndef f(completion, answer):\n    return one(completion, answer)\n",
        "async": (
            "import bapo\n@bapo.reward\nasync def f(completion, answer, **row):\n    return one(completion, answer)\n"
        ),
    },
    "trl": {
        "": "def f(completions, answer, **kwargs):\n    return [one(c, a) for c, a in zip(completions, answer)]\n",
        "async": (
            "async def f(completions, answer, **kw):\n    return [one(c, a) for c, a in zip(completions, answer)]\n"
        ),
    },
    "verl": {
        "": "def f(solution_str, ground_truth, extra_info=None):\n    return one(solution_str, ground_truth)\n",
        "dict": (
            "def f(data_source, solution_str, ground_truth, extra_info):\n"
            "    return {'score': one(solution_str, ground_truth), 'pred': solution_str}\n"
        ),
        "async": "async def f(solution_str, ground_truth, **kwargs):\n    return one(solution_str, ground_truth)\n",
    },
}
"""Of each adapter: functions that reward the answer by 1, leave "skip" ungraded, raise on "raise", and else give 0."""

PROMPT = make_prompt("sums", "1+1?", {"answer": "2"})
CASES = [(adapter, kind) for adapter, kinds in EXAMPLES.items() for kind in kinds]


def _name(adapter: str, function: str) -> str:
    return function if adapter == "plain" else f"{adapter}:{function}"


def _rewards(reward: Verifier, texts: list[str]) -> list[object]:
    """Without the facts of a dict of verl."""
    return [found[0] if isinstance(found, tuple) else found for found in reward(PROMPT, texts)]


@pytest.fixture(params=CASES, ids="-".join)
def reward(request: pytest.FixtureRequest, tmp_path: Path) -> Verifier:
    adapter, kind = request.param
    (tmp_path / "mine.py").write_text(BODY + EXAMPLES[adapter][kind])
    return load_reward(_name(adapter, f"{tmp_path / 'mine.py'}:f"))


def test_the_answer_is_rewarded_one_and_anything_else_zero_in_the_order_of_the_texts(reward: Verifier) -> None:
    assert _rewards(reward, ["2", "3", "", "2"]) == [1.0, 0.0, 0.0, 1.0]
    assert _rewards(reward, ["two"]) == [0.0]


def test_none_stays_none(reward: Verifier) -> None:
    assert _rewards(reward, ["2", "skip", "3"]) == [1.0, None, 0.0]


def test_a_group_with_an_ungraded_response_gets_no_rewards_at_all(reward: Verifier) -> None:
    assert grade(reward, PROMPT, ["2", "3"], (0.0, 1.0)) == {"rewards": [1.0, 0.0]}
    answer = grade(reward, PROMPT, ["2", "skip", "3", "skip"], (0.0, 1.0))
    assert answer == {"ungraded": "left 2 of 4 responses ungraded (it returned None)", "num_ungraded": 2}


def test_an_exception_is_told_with_the_file_and_line_of_the_function(reward: Verifier) -> None:
    failed = grade(reward, PROMPT, ["raise"], (0.0, 1.0))["failed"]
    assert failed.startswith("raised ValueError: cannot read this (mine.py line 4)")
    assert "'raise'" in failed


@pytest.mark.parametrize("adapter", EXAMPLES)
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nowhere.py:f", "file nowhere.py not found"),
        ("no_such_module:f", "importing no_such_module failed"),
        ("{folder}/mine.py:on", "has no 'on' .did you mean 'one'"),
        ("{folder}/broken.py:f", "importing .*broken.py failed: NameError: .*broken.py line 2"),
        ("{folder}/mine.py:number", "number is a int, not a function"),
        ("nothing", "must have the form"),
    ],
)
def test_a_function_that_cannot_be_found_is_refused_with_a_reason(
    adapter: str, function: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(BODY + "number = 3\n")
    (tmp_path / "broken.py").write_text("a = 1\nb = c\n")
    name = _name(adapter, function.format(folder=tmp_path))
    with pytest.raises(ConfigError, match=message):
        load_reward(name)


@pytest.mark.parametrize("adapter", EXAMPLES)
def test_a_file_imports_what_lies_beside_it(adapter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    helper = f"beside_{adapter}"
    (tmp_path / f"{helper}.py").write_text(BODY)
    (tmp_path / "mine.py").write_text(f"from {helper} import one\n" + EXAMPLES[adapter][""])
    reward = load_reward(_name(adapter, f"{tmp_path / 'mine.py'}:f"))
    assert list(reward(PROMPT, ["2"])) == [1.0]
