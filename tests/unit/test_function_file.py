"""A reward of a notebook becomes a file of its own source; what that cannot hold is refused by name."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bapo.core.errors import ConfigError
from bapo.function_file import named
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
    name, text = named(cell(HELPERS), tmp_path / "reward.py")
    assert name == f"{tmp_path}/reward.py:f"
    (tmp_path / "reward.py").write_text(text)
    reward = load_reward(name)
    prompt = make_prompt("sums", "1+0=", {"answer": "1"})
    # "aab" has three: round(3 / 2.5) == 1 == ceil(.5), with an a; "bbb" has none; "a" has one: round(.4) == 0.
    assert list(reward(prompt, ["aab", "bbb", "a"])) == [1.0, 0.0, 0.0]
    assert "of_pattern" not in text


def test_a_function_of_a_module_stays_where_it_is(tmp_path: Path) -> None:
    assert named(is_right, tmp_path / "reward.py") == ("bapo.tasks.countdown:is_right", "")


def test_functions_of_other_frameworks_are_known_by_their_arguments(tmp_path: Path) -> None:
    trl = cell("def f(completions, **kwargs):\n    return [1.0 for _ in completions]\n")
    assert named(trl, tmp_path / "r.py")[0] == f"trl:{tmp_path}/r.py:f"
    verl = cell("def f(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    assert named(verl, tmp_path / "r.py")[0] == f"verl:{tmp_path}/r.py:f"


def test_functions_of_a_list_share_a_file_and_what_they_use(tmp_path: Path) -> None:
    source = (
        "import math\nLIMIT = 3\n"
        "def size(text):\n    return len(text)\n"
        "def f(prompt, text):\n    return float(size(text) < LIMIT)\n"
        "def g(completions, **kwargs):\n    return [math.floor(size(one) / LIMIT) for one in completions]\n"
    )
    f = cell(source)
    g = f.__globals__["g"]
    tables = [f, {"function": g, "weight": 0.5}, "task", {"function": "m.py:h"}]
    names, text = named(tables, tmp_path / "r.py")
    assert names == [
        f"{tmp_path}/r.py:f",
        {"function": f"trl:{tmp_path}/r.py:g", "weight": 0.5},
        "task",
        {"function": "m.py:h"},
    ]
    assert [text.count(part) for part in ("LIMIT = 3", "import math", "def size", "def f", "def g")] == [1] * 5
    (tmp_path / "r.py").write_text(text)
    prompt = make_prompt("sums", "1+0=", {"answer": "1"})
    assert list(load_reward(names[0])(prompt, ["aa", "aaa"])) == [1, 0]
    assert list(load_reward(names[1]["function"])(prompt, ["aa", "aaa"])) == [0, 1]
    assert named([f, f.__globals__["size"]], tmp_path / "r.py")[1].count("def size") == 1


def test_two_things_of_one_name_in_one_file_are_refused(tmp_path: Path) -> None:
    one = cell("LIMIT = 3\ndef f(prompt, text):\n    return float(len(text) < LIMIT)\n")
    two = cell("LIMIT = [4]\ndef g(prompt, text):\n    return float(len(text) < LIMIT[0])\n", "g")
    with pytest.raises(ConfigError) as refused:
        named([one, two], tmp_path / "r.py")
    assert "two functions use the name LIMIT for different things" in str(refused.value)


def closure() -> Callable[..., Any]:
    wanted = "5"
    return lambda: wanted


def named_closure() -> Callable[..., Any]:
    wanted = "5"

    def score(prompt: object, text: str) -> float:
        return float(text == wanted)

    return score


def test_a_helper_with_the_name_of_a_builtin_is_taken_along(tmp_path: Path) -> None:
    source = "def format(text):\n    return '<answer>' in text\ndef f(prompt, text):\n    return float(format(text))\n"
    name, text = named(cell(source), tmp_path / "r.py")
    (tmp_path / "r.py").write_text(text)
    assert list(load_reward(name)(make_prompt("t", "1+1", {}), ["2", "<answer>2"])) == [0, 1]


def test_a_constant_that_is_none_is_taken_along(tmp_path: Path) -> None:
    name, text = named(cell("LIMIT = None\ndef f(prompt, text):\n    return float(LIMIT is None)\n"), tmp_path / "r.py")
    (tmp_path / "r.py").write_text(text)
    assert list(load_reward(name)(make_prompt("t", "1+1", {}), ["2"])) == [1]


MADE = """
wanted = "6"
def make(wanted):
    def helper(text):
        return text == wanted
    return helper
helper = make("5")
def f(prompt, text):
    return float(helper(text))
"""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda prompt, text: 1.0, "a lambda has no name"),
        (closure(), "a lambda has no name"),
        (named_closure(), "score uses wanted of the function around it"),
        (cell(MADE), "helper uses wanted of the function around it"),
        (cell("N = 2\ndef f(prompt, text, *, n=N):\n    return n\nN = 3\n"), "defined with N = 2, which is 3 now"),
        (cell("N = 2\ndef f(prompt, text, n=N):\n    return n\nN = 3\n"), "defined with N = 2, which is 3 now"),
        (cell(HELPERS, "of_pattern"), "of_pattern uses NUMBER, a Pattern, which cannot be written to a file"),
        (len, "is not a function defined by def"),
        ("x".startswith, "is not a function defined by def"),
    ],
)
def test_what_has_no_source_of_its_own_is_refused_with_the_remedy(
    function: Callable[..., Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        named(function, tmp_path / "reward.py")
    assert words in str(refused.value)
    assert 'reward="my_rewards.py:function"' in str(refused.value)
