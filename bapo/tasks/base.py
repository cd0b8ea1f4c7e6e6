"""What a task is: where prompts come from, and what is right.

A user's own task is any object with this shape, named in the config by dotted path
(`task.name = "my_package.my_module:make_task"`, called with the `[task.options]` table as keywords).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

from bapo.core.codec import require_carried
from bapo.core.errors import ConfigError, ContractError
from bapo.core.types import IMAGE as IMAGE
from bapo.core.types import Prompt


class Task(Protocol):
    """Prompts and a verifiable reward. Pure: the same arguments always give the same answer."""

    name: str

    def prompts(self, split: str) -> Sequence[Prompt]:
        """All prompts of a split, in a stable order. Every task has the split `train`; others are held out.

        Raises: ConfigError for an unknown split, naming the known ones.
        """
        ...

    @property
    def held_out_splits(self) -> tuple[str, ...]:
        """Names of the splits that are measured and never trained."""
        ...

    def reward(self, prompt: Prompt, text: str) -> float | None:
        """r(x, y) in [0, 1]. Wrong or unparseable text is 0.0, never an exception; None: it cannot be graded."""
        ...

    # A task may also have `level(prompt) -> float | None`, its own measure of difficulty, easy is low: prompt selectors
    # that go from easy to hard need it.

    def gold(self, prompt: Prompt) -> str | None:
        """A right response, if one is known: `bapo doctor` checks that it is rewarded 1.0."""
        ...


@runtime_checkable
class HasExtract(Protocol):
    """Optional for a task: the part of a response that its reward reads, for people who read responses.

    With an attribute `extracts_by_gold` that is true it holds for `[task] reward` as well.
    """

    def extract(self, prompt: Prompt, text: str) -> str | None:
        """The answer that `reward` compares; None when the text has none."""
        ...


@runtime_checkable
class GradesGroups(Protocol):
    """Optional for a task: all responses to a prompt graded in one call. None: it cannot be graded."""

    def rewards(self, prompt: Prompt, texts: Sequence[str]) -> Sequence[float | None]:
        """[G] rewards in the order of the texts."""
        ...


@runtime_checkable
class LoadsReward(Protocol):
    """Optional for a task: a user's code, imported only by graders."""

    def load_reward(self) -> None:
        """Import it now. Raises: ConfigError."""
        ...


@runtime_checkable
class HasExpert(Protocol):
    """Optional for a task: solutions that are worth training on (LUFFY, ReLIFT). Without it, `gold` is one."""

    def expert(self, prompt: Prompt) -> str | None:
        """A solution in an expert's words, with the steps that lead to it; None when there is none."""
        ...


@runtime_checkable
class HasImages(Protocol):
    """Optional for a task: the images of its prompts (`bapo.tasks.images` reads and checks them)."""

    def image(self, digest: str) -> bytes:
        """The PNG or JPEG file with this sha256, which a prompt of the task names. Raises: KeyError for another."""
        ...


ROW, MESSAGES = "_row", "_messages"
"""Keys of `Prompt.answer` that are ours: where the prompt stands in its file, the conversation that it came from."""


def make_prompt(
    task: str,
    text: str,
    answer: Mapping[str, Any],
    *,
    extra: Mapping[str, Any] | None = None,
    images: Sequence[str] = (),
) -> Prompt:
    """A prompt whose id is the hash of its content, so that it is recognized across epochs and runs (eq. 4).

    Args:
        extra: columns that a reward may read and that do not change the prompt: kept in `answer`, left out of the id.
        images: digests of its images, one for each `<image>` in the text, in order; the task has their files
            (`HasImages`).
    Raises: ConfigError when it cannot travel: an integer beyond 64 bits, half a character, an answer of more than 32
        levels, more than 896 KiB in all; or when it has more or fewer images than `<image>`.
    """
    content = json.dumps([task, text, answer, *([images] if images else [])], sort_keys=True, separators=(",", ":"))
    prompt_id = hashlib.sha256(content.encode()).hexdigest()[:16]
    prompt = Prompt(prompt_id=prompt_id, text=text, task=task, answer={**(extra or {}), **answer}, images=tuple(images))
    if images and text.count(IMAGE) != len(images):
        raise ConfigError(
            f"the prompt {text[:80]!r} of task {task!r} has {text.count(IMAGE)} {IMAGE} for {len(images)} images; "
            f"write one {IMAGE} where each image stands"
        )
    try:
        require_carried(prompt)
    except ContractError as error:
        raise ConfigError(f"the prompt {text[:80]!r} of task {task!r} cannot be used: {error}") from error
    return prompt


def columns_of(prompt: Prompt) -> dict[str, Any]:
    """What a function may ask for by name: `answer`, and the other columns that the dataset keeps."""
    return {name: value for name, value in prompt.answer.items() if name not in (ROW, MESSAGES)}


def conversation_of(prompt: Prompt) -> list[Mapping[str, str]] | None:
    """The messages that the prompt was written from; None for a prompt that was text."""
    return cast("list[Mapping[str, str]] | None", prompt.answer.get(MESSAGES))
