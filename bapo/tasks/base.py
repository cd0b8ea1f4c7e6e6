"""Tasks: prompts and their verifiable reward.

    class Doubles(Task):
        name = "doubles"
        held_out_splits = ("test",)
        def prompts(self, split): ...
        def reward(self, prompt, text): ...

`task.name` is the name of one that is shipped, or any callable that returns one, of a user's own:
`my_package.my_module:Doubles`. It gets the `[task.options]` table as keywords, or as an argument whose type derives
from `TaskOptions`; and what it may know of the run as an argument of type `TaskContext`.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import Field

from bapo.algorithms.settings import Frozen
from bapo.core.codec import require_carried
from bapo.core.errors import ConfigError, ContractError, did_you_mean
from bapo.core.types import IMAGE as IMAGE
from bapo.core.types import MESSAGES, Prompt

Graded = float | None | tuple[float | None, Mapping[str, float]]
"""The reward of a response, None: it cannot be graded; or the reward and facts, which are recorded."""

TRAIN = "train"
"""The split that is trained."""


class TaskOptions(Frozen):
    """Base class of the `[task.options]` table of a task: typed, unknown keys are refused."""


class GeneratedOptions(TaskOptions):
    """Of tasks whose problems are generated."""

    num_train: int = Field(2000, ge=1)
    """Problems in `train`."""
    seed: int = 0
    """Of these."""
    num_held_out: int = Field(1000, ge=1)
    """Problems in each held-out split."""
    held_out_seed: int = 0
    """Of these: runs that differ in `seed` are measured on the same problems."""

    def size_of(self, split: str) -> tuple[int, int]:
        """The number of problems in a split, and their seed."""
        return (self.num_train, self.seed) if split == TRAIN else (self.num_held_out, self.held_out_seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskContext:
    """What a task may know of its run."""

    member: str = ""
    """Of a family of tasks, `reasoning_gym:NAME`: the name."""
    tokenizer: str | None = None
    """Folder or Hub id of the model, whose chat template writes conversations."""
    rewards: tuple[str, ...] = ()
    """The functions of `task.reward`, with `task` for the task's own among several; its prompts keep the columns that
    they ask for. Empty: the task's own reward grades."""
    for_agents: bool = False
    """Whether agents send the conversations of prompts, so that their address writes them, by the model's template."""


class Task(ABC):
    """Prompts and a verifiable reward. Pure: the same arguments always return the same result."""

    name: str
    """As its prompts have it."""
    held_out_splits: tuple[str, ...]
    """Names of the splits that are evaluated and never trained."""
    is_family = False
    """Whether it is many tasks, each with a name: `reasoning_gym:NAME`."""
    extracts_by_gold = False
    """Whether `extract` holds for any reward, `task.reward` too."""
    is_fast = False
    """Whether its own verifier is fast, and neither hangs nor crashes: checks call it in their own process."""

    @abstractmethod
    def prompts(self, split: str) -> Sequence[Prompt]:
        """All prompts of a split, in a stable order. Every task has the split `train`; all other splits are held out.

        Raises: ConfigError for an unknown split.
        """

    @abstractmethod
    def reward(self, prompt: Prompt, text: str) -> Graded:
        """r(x, y) in [0, 1]. Wrong or unparsable text is 0.0, never an exception; None: it cannot be graded."""

    def rewards(self, prompt: Prompt, texts: Sequence[str]) -> Sequence[Graded]:
        """[G] rewards of all responses to a prompt, in the order of the texts."""
        return [self.reward(prompt, text) for text in texts]

    def gold(self, prompt: Prompt) -> str | None:
        """A correct response, if one is known: `bapo doctor` checks that its reward is 1.0."""
        return None

    def expert(self, prompt: Prompt) -> str | None:
        """An expert's solution with its reasoning, to train on (LUFFY, ReLIFT); None if there is none."""
        return self.gold(prompt)

    def extract(self, prompt: Prompt, text: str) -> str | None:
        """The part of a response that `reward` reads, for display and majority votes; None if the text has none."""
        return None

    def level(self, prompt: Prompt) -> float | None:
        """The difficulty, lower is easier; selectors with a curriculum need it for every prompt."""
        return None

    def image(self, digest: str) -> bytes:
        """The PNG or JPEG file with this sha256, from a prompt of the task, read and checked by `bapo.tasks.images`.

        Raises: KeyError if there is none; ConfigError for a task without images.
        """
        raise ConfigError(f"task {self.name!r}: its prompts have images, so it must define image(digest)")

    def chat_variables(self) -> Mapping[str, Any]:
        """Variables of the chat template, besides the conversation, for the address that agents call."""
        return {}

    def load_reward(self) -> None:  # noqa: B027 - most tasks have none
        """Import user code that only graders need. Raises: ConfigError."""


def as_task(made: object) -> Task:
    """What a user's factory returned, as a task: an object with the members of one need not derive from `Task`.

    Raises: ConfigError that names the members that are missing.
    """
    required = ("name", "held_out_splits", *sorted(Task.__abstractmethods__))
    if missing := [name for name in required if not hasattr(made, name)]:
        raise ConfigError(f"{type(made).__name__} is missing {', '.join(missing)}; derive it from bapo.tasks.base.Task")
    if isinstance(made, Task):
        return made
    found = {name: getattr(made, name, None) for name in (*required, *dir(Task)) if not name.startswith("_")}
    members = {name: staticmethod(own) if callable(own) else own for name, own in found.items() if own is not None}
    task: Task = type(type(made).__name__, (Task,), members)()
    return task


def splits_of(task: Task) -> tuple[str, ...]:
    """The training split and those that are held out."""
    return (TRAIN, *task.held_out_splits)


def require_split(task: Task, split: str) -> None:
    """Raises: ConfigError for a split that the task does not have."""
    if split not in (known := splits_of(task)):
        raise ConfigError(
            f"task {task.name} has no split {split!r}{did_you_mean(split, known)}; it has {', '.join(known)}"
        )


def extract_of(task: Task, *, another_reward: bool = False) -> Callable[[Prompt, str], str | None] | None:
    """How a task finds the answer in a response; None when it does not say.

    Args:
        another_reward: responses are graded by another reward than the task's own. It reads another answer, unless
            the task goes by a format that holds for both (`extracts_by_gold`).
    """
    says = type(task).extract is not Task.extract
    return task.extract if says and (task.extracts_by_gold or not another_reward) else None


ROW, TEMPLATED = "_row", "_templated"
"""Reserved keys of `Prompt.answer`: the prompt's position in its file, its original conversation, and whether a chat
template wrote its text. None of them changes the prompt's id."""
RESERVED = frozenset({ROW, MESSAGES, TEMPLATED})
ASSISTANT = "assistant"


class NoRewardError(Exception):
    """Raised by a reward function that cannot grade a group now: it is ungraded, for the reason in the message."""


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
            (`Task.image`).
        templated: whether `text` has all special tokens already, as a chat template writes them: then the tokenizer
            adds none. None: it is text, unless it has the conversation that it was written from.
    Raises: ConfigError if it cannot be serialized: an integer beyond 64 bits, a lone surrogate, an answer nested deeper
        than 32 levels, more than 896 KiB in total; or if the number of images is not that of `<image>`.
    """
    content = json.dumps([task, text, answer, *([images] if images else [])], sort_keys=True, separators=(",", ":"))
    prompt_id = hashlib.sha256(content.encode()).hexdigest()[:16]
    known = {**(extra or {}), **({} if templated is None else {TEMPLATED: templated}), **answer}
    if images and text.count(IMAGE) != len(images):
        raise ConfigError(
            f"the prompt {text[:80]!r} of task {task!r} has {text.count(IMAGE)} {IMAGE} for {len(images)} images; "
            f"write one {IMAGE} per image"
        )
    try:
        prompt = Prompt(prompt_id=prompt_id, text=text, task=task, answer=known, images=tuple(images))
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
