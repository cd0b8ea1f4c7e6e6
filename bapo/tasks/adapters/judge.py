"""A model as the reward function: `reward = "judge:rubric.toml"` (docs/your_task.md).

    score       each response --> {"score": 7} on the scale 1 to 10 --> 0.67
    pairwise    response i against i + 1, ..., i + opponents of its group, in both orders --> share of wins, a tie is .5

If the judge could not be had for a response, or said nothing that is a verdict, its group is ungraded, with the reason,
and graded again: what the judge has said meanwhile comes from the store.

Refused: prompts with images, which the judge would not see. Not supported: comparisons between groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from bapo.core.errors import ConfigError
from bapo.core.types import Prompt
from bapo.tasks.base import columns_of, conversation_of
from bapo.tasks.judging import Judge, JudgeError, question, read_rubric, score_in, winner

GRADES_GROUPS = True
"""All responses of a group are judged together: at the same time, or against each other."""


def make_reward(name: str) -> Callable[[Prompt, Sequence[str]], Sequence[float]]:
    """The reward of a rubric file. Raises: ConfigError."""
    judge = Judge(read_rubric(name))
    of_group = _scored if judge.rubric.mode == "score" else _compared
    return lambda prompt, texts: of_group(judge, prompt, texts)


def _scored(judge: Judge, prompt: Prompt, texts: Sequence[str]) -> list[float]:
    """[G] scores. Raises: JudgeError; ConfigError and KeyError as `_shown`."""
    (task, answer), read = _shown(judge, prompt), score_in(judge.rubric.scale)

    def score(text: str) -> float:
        return judge.ask(question(judge.rubric, task, answer, [("response", text)]), read)

    with ThreadPoolExecutor(judge.rubric.concurrency) as pool:
        return list(pool.map(score, texts))


def _compared(judge: Judge, prompt: Prompt, texts: Sequence[str]) -> list[float]:
    """[G] shares of wins. Raises: JudgeError, also for one missing comparison: shares would not be comparable."""
    (task, answer), num = _shown(judge, prompt), len(texts)
    if num == 1:
        raise JudgeError('a response without another one of its prompt cannot be compared: use mode = "score"')
    pairs = pairs_of(num, judge.rubric.opponents)

    def wins(pair: tuple[int, int]) -> float:
        """Of the first one: 1, .5 or 0."""
        first, second = (texts[place] for place in pair)
        if first == second:
            return 0.5
        said = judge.ask(question(judge.rubric, task, answer, [("A", first), ("B", second)]), winner)
        return {"A": 1.0, "B": 0.0, "tie": 0.5}[said]

    with ThreadPoolExecutor(judge.rubric.concurrency) as pool:
        found = list(pool.map(wins, pairs))
    won, met = [0.0] * num, [0] * num
    for (first, second), share in zip(pairs, found, strict=True):
        won[first] += share
        won[second] += 1 - share
        met[first] += 1
        met[second] += 1
    return [share / count for share, count in zip(won, met, strict=True)]


def _shown(judge: Judge, prompt: Prompt) -> tuple[str, object]:
    """The conversation without what a chat template adds; the answer, if the judge sees it.

    Raises: ConfigError for images; KeyError for `with_answer` and a prompt that has no `answer`.
    """
    if prompt.images:
        raise ConfigError("a judge sees no images, and this prompt has some: use a reward function that needs none")
    messages, answer = conversation_of(prompt), columns_of(prompt)["answer"] if judge.rubric.with_answer else None
    task = prompt.text if messages is None else "\n\n".join(f"{one['role']}: {one['content']}" for one in messages)
    return task, answer


def pairs_of(num: int, opponents: int) -> list[tuple[int, int]]:
    """Pairs of `num` >= 2 responses in a circle, each in both orders; every response is in as many."""
    pairs = {(i, (i + step) % num) for i in range(num) for step in range(1, min(opponents, num - 1) + 1)}
    return sorted(pairs | {(second, first) for first, second in pairs})
