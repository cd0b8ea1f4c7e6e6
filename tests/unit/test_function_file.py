"""A reward of a notebook becomes a file of its own source; what that cannot hold is refused by name."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bapo.core.errors import ConfigError
from bapo.function_file import name_of
from bapo.tasks.base import make_prompt
from bapo.tasks.countdown import is_right
from bapo.tasks.rewards import load_reward


def cell(source: str, name: str = "f") -> Callable[..., Any]:
    """A function as a kernel makes it of a cell."""
    file = f"<cell {abs(hash(source))}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, file, "exec"), namespace)
    found: Callable[..., Any] = namespace[name]
    return found


HELPERS = '''
import math
import re as regex
from collections import Counter
from bapo import reward
LIMIT, WORDS = 2.5, ["a", "b"]
NUMBER = regex.compile("x")

def half(x):
    """Of a helper."""
    return round(x / LIMIT)

@reward
def f(completion, answer, **row):
    found = regex.findall("[ab]", completion)
    return float(half(len(found)) == math.ceil(0.5) and Counter(found)["a"] >= 1 and WORDS[0] == "a")

def of_pattern(prompt, text):
    return float(bool(NUMBER.match(text)))
'''


def test_a_function_takes_its_imports_helpers_and_constants_with_it(tmp_path: Path) -> None:
    name, text = name_of(cell(HELPERS), tmp_path / "reward.py")
    assert name == f"{tmp_path}/reward.py:f"
    (tmp_path / "reward.py").write_text(text)
    reward = load_reward(name)
    prompt = make_prompt("sums", "1+0=", {"answer": "1"})
    # "aab" has three: round(3 / 2.5) == 1 == ceil(.5), with an a; "bbb" has none; "a" has one: round(.4) == 0.
    assert list(reward(prompt, ["aab", "bbb", "a"])) == [1.0, 0.0, 0.0]
    assert "of_pattern" not in text


def test_a_function_of_a_module_stays_where_it_is(tmp_path: Path) -> None:
    assert name_of(is_right, tmp_path / "reward.py") == ("bapo.tasks.countdown:is_right", "")


def test_functions_of_other_frameworks_are_known_by_their_arguments(tmp_path: Path) -> None:
    trl = cell("def f(completions, **kwargs):\n    return [1.0 for _ in completions]\n")
    assert name_of(trl, tmp_path / "r.py")[0] == f"trl:{tmp_path}/r.py:f"
    verl = cell("def f(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    assert name_of(verl, tmp_path / "r.py")[0] == f"verl:{tmp_path}/r.py:f"


def closure() -> Callable[..., Any]:
    wanted = "5"
    return lambda: wanted


def named_closure() -> Callable[..., Any]:
    wanted = "5"

    def score(prompt: object, text: str) -> float:
        return float(text == wanted)

    return score


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda prompt, text: 1.0, "a lambda has no name"),
        (closure(), "a lambda has no name"),
        (named_closure(), "score uses wanted of the function around it"),
        (cell(HELPERS, "of_pattern"), "of_pattern uses NUMBER, a Pattern, which cannot be written to a file"),
        (len, "is not a function defined by def"),
        ("x".startswith, "is not a function defined by def"),
    ],
)
def test_what_has_no_source_of_its_own_is_refused_with_the_remedy(
    function: Callable[..., Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        name_of(function, tmp_path / "reward.py")
    assert words in str(refused.value)
    assert 'reward="my_rewards.py:function"' in str(refused.value)
