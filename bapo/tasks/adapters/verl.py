"""verl's custom rewards: `compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict`.

    reward = "verl:my_score.py:compute_score"      the function name is optional: "verl:my_score.py"

If it returns a dict, `score` is used, and its other numbers are facts. `data_source` and `extra_info` come from the
columns of these names (kept automatically for files in verl's layout), `ground_truth` is the answer. None means
ungraded; may be async. Scores outside [0, 1], such as -1 and 1 in verl's DAPO, require `task.reward_range`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bapo.core.types import Prompt
from bapo.core.user_code import load_function
from bapo.tasks.base import Graded, columns_of
from bapo.tasks.user_functions import call_with, settled

DEFAULT_FUNCTION = "compute_score"


def make_reward(name: str) -> Callable[[Prompt, Sequence[str]], list[Graded]]:
    """Wrap the function; called once per response. Raises: ConfigError."""
    function = load_function(full_name(name), key="reward verl:")

    def of_group(prompt: Prompt, texts: Sequence[str]) -> list[Graded]:
        found = settled([call_with(function, {}, _arguments(prompt, text)) for text in texts])
        return [_score(one) for one in found]

    return of_group


def full_name(name: str) -> str:
    """With the function that verl calls where none is named."""
    return f"{name}:{DEFAULT_FUNCTION}" if name.endswith(".py") else name


def _arguments(prompt: Prompt, text: str) -> dict[str, Any]:
    columns = columns_of(prompt)
    return {
        "data_source": columns.get("data_source", prompt.task),
        "solution_str": text,
        "ground_truth": columns.get("answer"),
        "extra_info": columns.get("extra_info") or {},
    }


def _score(found: Any) -> Graded:
    if not isinstance(found, Mapping):
        return found  # type: ignore[no-any-return] # the grader checks what it is
    if "score" not in found:
        raise TypeError(f"returned a dict without 'score': it has {', '.join(map(str, found)) or 'nothing'}")
    facts = {name: value for name, value in found.items() if name != "score"}
    return (found["score"], facts) if facts else found["score"]
