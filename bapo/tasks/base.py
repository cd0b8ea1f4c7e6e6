"""Interface of a task: its prompts and its reward.

A custom task is any object with this interface, given in the config as a dotted path
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
    """Prompts and a verifiable reward. Pure: the same arguments always return the same result."""

    name: str

    def prompts(self, split: str) -> Sequence[Prompt]:
        """All prompts of a split, in a stable order. Every task has the split `train`; all other splits are held out.

        Raises: ConfigError for an unknown split.
        """
        ...

    @property
    def held_out_splits(self) -> tuple[str, ...]:
        """Names of the splits that are evaluated and never trained."""
        ...

    def reward(self, prompt: Prompt, text: str) -> float | None:
        """r(x, y) in [0, 1]. Wrong or unparsable text is 0.0, never an exception; None: it cannot be graded."""
        ...

    # A task may also have `level(prompt) -> float | None`, a difficulty where lower is easier: required by curriculum
    # selectors.

    def gold(self, prompt: Prompt) -> str | None:
        """A correct response, if one is known: `bapo doctor` checks that its reward is 1.0."""
        ...


@runtime_checkable
class HasExtract(Protocol):
    """Optional for a task: the part of a response that its reward reads, for display.

    If an attribute `extracts_by_gold` is true, it also applies to `[task] reward`.
    """

    def extract(self, prompt: Prompt, text: str) -> str | None:
        """The answer that `reward` compares; None if the text has none."""
        ...


@runtime_checkable
class GradesGroups(Protocol):
    """Optional for a task: grade all responses to a prompt in one call. None: it cannot be graded."""

    def rewards(self, prompt: Prompt, texts: Sequence[str]) -> Sequence[float | None]:
        """[G] rewards in the order of the texts."""
        ...


@runtime_checkable
class LoadsReward(Protocol):
    """Optional for a task: user code that only graders import."""

    def load_reward(self) -> None:
        """Import it now. Raises: ConfigError."""
        ...


@runtime_checkable
class HasExpert(Protocol):
    """Optional for a task: expert solutions to train on (LUFFY, ReLIFT). Default: `gold`."""

    def expert(self, prompt: Prompt) -> str | None:
        """An expert's solution with its reasoning; None if there is none."""
        ...


@runtime_checkable
class HasImages(Protocol):
    """Optional for a task: the images of its prompts (read and checked by `bapo.tasks.images`)."""

    def image(self, digest: str) -> bytes:
        """The PNG or JPEG file with this sha256, from a prompt of the task. Raises: KeyError if there is none."""
        ...


ROW, MESSAGES, TEMPLATED = "_row", "_messages", "_templated"
"""Reserved keys of `Prompt.answer`: the prompt's position in its file, its original conversation, and whether a chat
template wrote its text. None of them changes the prompt's id."""
RESERVED = frozenset({ROW, MESSAGES, TEMPLATED})
ASSISTANT = "assistant"


def make_prompt(
    task: str,
    text: str,
    answer: Mapping[str, Any],
    *,
    extra: Mapping[str, Any] | None = None,
    images: Sequence[str] = (),
    templated: bool | None = None,
) -> Prompt:
    """Create a prompt whose id is the hash of its content, so that it is stable across epochs and runs (eq. 4).

    Args:
        extra: columns for the reward that do not change the prompt: stored in `answer`, excluded from the id.
        images: digests of its images, one per `<image>` in the text, in order; the task provides the files
            (`HasImages`).
        templated: whether `text` has all special tokens already, as a chat template writes them: then the tokenizer
            adds none. None: it is text, unless it has the conversation that it was written from.
    Raises: ConfigError if it cannot be serialized: an integer beyond 64 bits, a lone surrogate, an answer nested deeper
        than 32 levels, more than 896 KiB in total; or if the number of images is not that of `<image>`.
    """
    content = json.dumps([task, text, answer, *([images] if images else [])], sort_keys=True, separators=(",", ":"))
    prompt_id = hashlib.sha256(content.encode()).hexdigest()[:16]
    known = {**(extra or {}), **({} if templated is None else {TEMPLATED: templated}), **answer}
    prompt = Prompt(prompt_id=prompt_id, text=text, task=task, answer=known, images=tuple(images))
    if images and text.count(IMAGE) != len(images):
        raise ConfigError(
            f"the prompt {text[:80]!r} of task {task!r} has {text.count(IMAGE)} {IMAGE} for {len(images)} images; "
            f"write one {IMAGE} per image"
        )
    try:
        require_carried(prompt)
    except ContractError as error:
        raise ConfigError(f"invalid prompt {text[:80]!r} of task {task!r}: {error}") from error
    return prompt


def columns_of(prompt: Prompt) -> dict[str, Any]:
    """Keyword arguments available to a reward function: `answer` and the other columns that the dataset keeps."""
    return {name: value for name, value in prompt.answer.items() if name not in RESERVED}


def conversation_of(prompt: Prompt) -> list[Mapping[str, str]] | None:
    """The messages that the prompt was rendered from; None for a text prompt."""
    return cast("list[Mapping[str, str]] | None", prompt.answer.get(MESSAGES))


def is_templated(prompt: Prompt) -> bool:
    """Whether the text has all special tokens already. Prompts of earlier versions do not say: a conversation was."""
    return bool(prompt.answer.get(TEMPLATED, MESSAGES in prompt.answer))


def beginning_of(prompt: Prompt) -> str:
    """The beginning of the assistant's message which the prompt ends with, and a response continues; usually empty."""
    messages = conversation_of(prompt)
    if not messages or messages[-1]["role"] != ASSISTANT:
        return ""
    content = messages[-1]["content"]
    # Some templates strip messages; prompts of earlier versions closed this message and opened another.
    return next((text for text in (content, content.strip()) if prompt.text.endswith(text)), "")


def whole_responses(prompt: Prompt, texts: Sequence[str]) -> list[str]:
    """[G] responses as rewards and readers see them: each with the beginning of its message."""
    beginning = beginning_of(prompt)
    return [beginning + text for text in texts]
