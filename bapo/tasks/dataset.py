"""Task `dataset`: prompts and answers from a file or a Hub dataset, graded by exact match or by a custom function.

    [task]
    name = "dataset"
    options = { path = "train.parquet", held_out = { test = "test.parquet" }, reward = "my_rewards.py:score" }

A prompt that is a list of messages is rendered with the model's chat template. If the assistant's message is the last,
the model continues it: rewards read it with the response, and a gold or expert solution may contain it. Images are
kept in memory, encoded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator

from bapo.config.rewards import OWN
from bapo.core.errors import ConfigError
from bapo.core.types import MESSAGES, Prompt
from bapo.tasks.answer_formats import marks_of, written_answer
from bapo.tasks.base import (
    IMAGE,
    ROW,
    TRAIN,
    Graded,
    Task,
    TaskContext,
    TaskOptions,
    beginning_of,
    conversation_of,
    make_prompt,
    require_split,
    whole_responses,
)
from bapo.tasks.chat import CHAT_DATE, Messages, Render, chat_template, chat_variables, is_open, written_open
from bapo.tasks.data_files import Row, first_with_values, is_file, read_rows
from bapo.tasks.images import Images, in_words
from bapo.tasks.rewards import Verifier, load_reward, reward_columns
from bapo.tasks.right_answers import as_text, exact_texts, folded, gold_text, is_list_in_text, right_answers
from bapo.tasks.tokenizer_files import TEMPLATE_FILE
from bapo.tasks.user_functions import ALL

log = logging.getLogger(__name__)

NAME = "dataset"
QUESTION = "{prompt}"
MESSAGE_FORMAT = "{content}\n"
"""For models without a chat template."""
ANSWER_COLUMNS: dict[str, tuple[str, ...]] = {
    "answer": (),
    "reward_model.ground_truth": ("data_source", "ability", "extra_info"),
    "reward_spec.ground_truth": ("data_source", "env_class", "extra_info"),
    "final_answer": (),
    "solution": (),
}
"""Native, verl, SkyRL, OlympiadBench, TRL: the first that has a value in any row of the file is taken, with the
columns that the layout's rewards ask for."""
PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction", "query", "input")
"""The first that has a value in any row of the file is taken."""
INSTRUCTION, INPUT = "instruction", "input"
"""Alpaca's two columns of one question; how they are joined is the choice of each trainer."""


class DatasetOptions(TaskOptions):
    """The `[task.options]` table."""

    path: str
    """Training data: a .parquet or .jsonl file (relative to the working directory), or a Hub id "owner/name:split"."""
    held_out: dict[str, str] = Field(default_factory=dict)
    """Name of each held-out split -> its data, written like `path`."""
    prompt_column: str | None = None
    """Dots step into nested columns; null: each file's own is recognized, the first of the known names that has a value
    in any row."""
    answer_column: str | None = None
    """Likewise."""
    extra_columns: tuple[str, ...] = ()
    """Further columns that the reward finds in `prompt.answer`, by name. Those that a function of columns takes by name
    or by `**kwargs` are there without it. A column `level` of numbers is the prompt's difficulty for selectors that go
    from easy to hard."""
    message_format: str | None = None
    """How one message of a conversation is written, with the fields {role} and {content}; null: the chat template of
    the tokenizer, and "{content}\\n" where it has none."""
    tokenizer: str | None = None
    """Folder or Hub id that has the chat template; null: the model's."""
    chat_options: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as { enable_thinking = false }; also `tools` and `documents`."""
    chat_date: str = CHAT_DATE
    """YYYY-MM-DD, for a chat template that prints today's date; fixed, so that prompt ids do not change from day to
    day."""
    question_format: str = QUESTION
    """What is asked, around the field {prompt}, where prompts are texts."""
    chat: bool = False
    """A prompt that is text is a message of the user, written by the chat template."""
    system_prompt: str | None = None
    """The first message of conversations that have no system message; texts need `chat`."""
    reward: str | None = None
    """A reward by name (docs/your_task.md); null: exact match of the stripped text with the answer, or with any of them
    where the answer is a list. `task.reward` replaces it."""
    gold_format: str | None = None
    """A response that the reward calls right, with the field {answer}, e.g. "<answer>{answer}</answer>"; it also says
    what the run's page shows as the extracted answer."""
    expert_column: str | None = None
    """An expert's solution of each problem, for methods that train on it; null: the gold response."""
    images_column: str | None = None
    """Images of a prompt, one or a list: paths (relative to the data file), or maps with `bytes` or `path`. The prompt
    has one `<image>` per image (docs/images.md)."""

    @field_validator("held_out")
    @classmethod
    def train_is_not_held_out(cls, held_out: dict[str, str]) -> dict[str, str]:
        """Check the names of the splits."""
        if TRAIN in held_out:
            raise ValueError(f"{TRAIN!r} is reserved for the training split")
        return held_out

    @field_validator("extra_columns")
    @classmethod
    def answer_is_not_extra(cls, extra_columns: tuple[str, ...]) -> tuple[str, ...]:
        """Check the names of the columns."""
        if "answer" in extra_columns:
            raise ValueError("'answer' is reserved for the answer column")
        return extra_columns

    @field_validator("question_format")
    @classmethod
    def question_format_has_the_prompt(cls, question_format: str) -> str:
        """Check the field."""
        if QUESTION not in question_format:
            raise ValueError(f"{question_format!r} must contain {QUESTION}")
        return question_format


class DatasetTask(Task):
    """Rows as prompts."""

    name = NAME
    is_fast = True
    origins: ClassVar[Mapping[str, str]] = {}
    """Name of a split -> where its file comes from, for the message when it is not there."""

    def __init__(self, options: DatasetOptions, context: TaskContext) -> None:
        """Files are read at the first call of `prompts`. Raises: ConfigError for what agents would not get."""
        _require_the_models_template(options, context)
        self.held_out_splits = tuple(options.held_out)
        self._options = options
        self._context = context
        self._sources = {TRAIN: options.path, **options.held_out}
        exact = "{answer}" if options.reward is None else None
        self._gold_format = exact if options.gold_format is None else options.gold_format
        self.extracts_by_gold = self._gold_format is not None and marks_of(self._gold_format) is not None
        self._images = Images()

    def prompts(self, split: str) -> Sequence[Prompt]:
        """All distinct prompts of a split, in file order.

        Raises: ConfigError for an unknown split or a malformed file.
        """
        require_split(self, split)
        return self._splits[split]

    def image(self, digest: str) -> bytes:
        """The file of an image of a prompt that was read. Raises: KeyError."""
        return self._images.image(digest)

    def chat_variables(self) -> Mapping[str, Any]:
        """The options of the chat template, and its date. Raises: ConfigError."""
        return chat_variables(self._options.chat_options, self._options.chat_date)

    def load_reward(self) -> None:
        """Import the user's reward, if there is one. Raises: ConfigError."""
        _ = self._reward

    def reward(self, prompt: Prompt, text: str) -> Graded:
        """The custom reward; without one, 1.0 if the stripped text is one of the right answers, else 0.0."""
        return self.rewards(prompt, [text])[0]

    def rewards(self, prompt: Prompt, texts: Sequence[str]) -> Sequence[Graded]:
        """Rewards of all responses to a prompt."""
        if self._reward is not None:
            return self._reward(prompt, texts)
        right = exact_texts(prompt.answer["answer"])
        # The answer may be all that follows the beginning of the message, or have it as well.
        whole = whole_responses(prompt, texts)
        return [
            float(not right.isdisjoint((folded(text), folded(full)))) for text, full in zip(texts, whole, strict=True)
        ]

    def level(self, prompt: Prompt) -> float | None:
        """The number in the column `level`, if it is one of `extra_columns`; otherwise None."""
        level = prompt.answer.get("level")
        return float(level) if isinstance(level, int | float) and not isinstance(level, bool) else None

    def gold(self, prompt: Prompt) -> str | None:
        """The answer in the given format; unknown for a custom reward without a format."""
        if self._gold_format is None:
            return None
        answer = prompt.answer["answer"]
        by_text = _compares_texts(self._options, self._context)
        gold = right_answers(answer)[0] if by_text else gold_text(answer)
        return _continued(prompt, self._gold_format.replace("{answer}", gold))

    def extract(self, prompt: Prompt, text: str) -> str | None:
        """The part of a response where `gold_format` puts the answer; the whole text for exact match; unknown for a
        custom reward without a format."""
        if self.extracts_by_gold:
            return written_answer(str(self._gold_format), beginning_of(prompt) + text)
        return text.strip() if self._options.reward is None else None

    def expert(self, prompt: Prompt) -> str | None:
        """Value of the column; without a column, the gold response."""
        if self._options.expert_column is None:
            return self.gold(prompt)
        value = prompt.answer.get(self._options.expert_column)
        return None if value is None else _continued(prompt, as_text(value))

    @cached_property
    def _reward(self) -> Verifier | None:
        """Imported only by graders."""
        return None if self._options.reward is None else load_reward(self._options.reward)

    @cached_property
    def _splits(self) -> dict[str, tuple[Prompt, ...]]:
        """Read together: a held-out prompt that is in the training file as well must not be trained."""
        self._require_files()
        splits = {split: self._read(source) for split, source in self._sources.items()}
        form = self._options.question_format
        held_out = {key for split in self.held_out_splits for one in splits[split].values() for key in _keys(one, form)}
        leaked = [prompt_id for prompt_id, one in splits[TRAIN].items() if not held_out.isdisjoint(_keys(one, form))]
        for prompt_id in leaked:
            del splits[TRAIN][prompt_id]
        if leaked:
            log.warning("dataset %s: dropped %d held-out prompts", self._sources[TRAIN], len(leaked))
        if not splits[TRAIN]:
            raise ConfigError(f"dataset {self._sources[TRAIN]}: every training prompt is in a held-out split")
        return {split: tuple(by_id.values()) for split, by_id in splits.items()}

    def _require_files(self) -> None:
        """Raises: ConfigError that names every file which is not there, and where it comes from."""
        missing = [
            source + (f" ({split} is {self.origins[split]} on the Hugging Face Hub)" if split in self.origins else "")
            for split, source in self._sources.items()
            if is_file(source) and not Path(source).is_file()
        ]
        if missing:
            raise ConfigError(f"dataset file {', '.join(missing)} not found (in {Path.cwd()})")

    def _read(self, source: str) -> dict[str, Prompt]:
        """Prompts by id, each once. Raises: ConfigError for a malformed row or a source without rows."""
        prompts: dict[str, Prompt] = {}
        num_rows = 0
        prompt_of = PromptWriter(source, self._options, self._context, self._images, task=self.name)
        for row in read_rows(source):
            num_rows += 1
            prompt = prompt_of(row)
            prompts.setdefault(prompt.prompt_id, prompt)
        if not prompts:
            raise ConfigError(f"dataset {source} has no rows")
        if num_rows > len(prompts):
            log.warning("dataset %s: dropped %d duplicate rows", source, num_rows - len(prompts))
        _tell_of_other_answers(source, prompts.values(), self._options.question_format)
        if _compares_texts(self._options, self._context):
            _tell_of_lists(source, prompts.values())
        return prompts


def _require_the_models_template(options: DatasetOptions, context: TaskContext) -> None:
    """Raises: ConfigError for agents' conversations that are to be written otherwise than their address does."""
    for name in ("message_format", "tokenizer") if context.for_agents else ():
        if getattr(options, name) not in (None, context.tokenizer):
            raise ConfigError(
                f"[agents] with task.options.{name}: their address writes conversations by the model's own chat "
                f"template; remove {name}, or write such a template to {TEMPLATE_FILE} in the folder of model.path"
            )


def _rewards(options: DatasetOptions, context: TaskContext) -> list[str | None]:
    """The functions that grade; None: answers are compared as texts."""
    return [options.reward if name == OWN else name for name in context.rewards or (OWN,)]


def _compares_texts(options: DatasetOptions, context: TaskContext) -> bool:
    """Whether an answer of any other type is the error of its row."""
    return None in _rewards(options, context)


def _question(prompt: Prompt, form: str) -> tuple[str, tuple[str, ...]]:
    """What is asked, as it is compared: `folded`, and without what `question_format` puts around it."""
    before, _, after = form.partition(QUESTION)
    said = [message["content"] for message in conversation_of(prompt) or ()] or [prompt.text]
    asked = [folded(text.removeprefix(before).removesuffix(after)) for text in said]
    return "\n".join(asked), tuple(prompt.images)


def _keys(prompt: Prompt, form: str) -> set[tuple[str, tuple[str, ...]]]:
    """The question, and the text: a file may have conversations as another has them rendered.

    Without the answer: one data set writes it as 142, the other as 142.0.
    """
    return {_question(prompt, form), (prompt.text, tuple(prompt.images))}


def _continued(prompt: Prompt, text: str) -> str:
    """A solution as what follows the beginning of the assistant's message, if there is one."""
    return text.removeprefix(beginning_of(prompt))


def _tell_of_other_answers(source: str, prompts: Iterable[Prompt], form: str) -> None:
    """Warn of one question with two answers: a response that is right in one row is wrong in the other."""
    first: dict[tuple[str, tuple[str, ...]], Prompt] = {}
    pairs = [(first.setdefault(_question(prompt, form), prompt), prompt) for prompt in prompts]
    others = [(one, two) for one, two in pairs if one.answer["answer"] != two.answer["answer"]]
    if others:
        one, two = (str(prompt.answer[ROW]).rpartition(" ")[2] for prompt in others[0])
        log.warning(
            "dataset %s: %d prompts have the text of an earlier one and another answer, the first in rows %s and %s",
            source,
            len(others),
            one,
            two,
        )


def _tell_of_lists(source: str, prompts: Iterable[Prompt]) -> None:
    """Warn where a list could be meant otherwise than it is graded."""
    answers = [prompt.answer["answer"] for prompt in prompts]
    if num := sum(isinstance(answer, list) and len(answer) > 1 for answer in answers):
        log.warning("dataset %s: %d answers are lists: any one answer of a list is right, alone", source, num)
    if num := sum(map(is_list_in_text, answers)):
        log.warning(
            "dataset %s: %d answers are texts that look like lists; only the whole text is right. Where any one of a "
            "list is right, make it a list of JSON or parquet",
            source,
            num,
        )


def require_whole(row: Row, column: str) -> None:
    """Check that a recognized column is the whole question. Raises: ConfigError for a row of Alpaca's with an input."""
    if column == INSTRUCTION and row.has(INPUT) and str(row.get(INPUT)).strip():
        raise ConfigError(
            f"{row.where}: the question is in two columns, {INSTRUCTION!r} and {INPUT!r} (Alpaca). Write both into a "
            f"column {PROMPT_COLUMNS[0]!r}, as the model shall read them; or leave {INPUT!r} out with "
            f"task.options.prompt_column = {INSTRUCTION!r} (bapo init, bapo reward test: --prompt-column)"
        )


class PromptWriter:
    """Writes the rows of one file as prompts, all by the same columns, whichever of them are null in a row."""

    def __init__(
        self, source: str, options: DatasetOptions, context: TaskContext, images: Images, *, task: str = NAME
    ) -> None:
        """Finds the columns that `options` does not name. Raises: ConfigError for a file that is missing.

        Args:
            images: where the images of the rows are stored.
            task: what prompts say of who grades them.
        """
        self._options, self._task, self._images = options, task, images
        prompts = (options.prompt_column,) if options.prompt_column else PROMPT_COLUMNS
        answers = (options.answer_column,) if options.answer_column else tuple(ANSWER_COLUMNS)
        prompt, answer = first_with_values(source, prompts, answers)
        self._prompt, self._answer = prompt or prompts[0], answer or options.answer_column
        self._folder = Path(source).parent if is_file(source) else None
        self._by_text = _compares_texts(options, context)
        self._for_reward = frozenset[str]().union(*map(reward_columns, filter(None, _rewards(options, context))))
        self._write = Conversations(options, context, self._prompt)

    def __call__(self, row: Row) -> Prompt:
        """One row as a prompt. Raises: ConfigError that names the row."""
        images, answer, extra = self._images_of(row), self._answer_of(row), dict(self._for_reward_of(row))
        if not row.has(self._prompt):
            raise ConfigError(
                f"{row.where}: column {self._prompt!r} is missing or null; the row has {list(row.values)}. "
                "Name the column of the prompts in task.options.prompt_column (bapo reward test: --prompt-column)"
            )
        if self._options.prompt_column is None:
            require_whole(row, self._prompt)
        value = self._value_of(row)
        asked = self._asked(value)
        is_messages = isinstance(asked, list)
        text = self._write(row, asked) if is_messages else self._plain(row, asked)
        if is_messages:
            extra[MESSAGES] = asked
        if not isinstance(text, str) or not text.strip() or not (images or _has_question(value)):
            raise ConfigError(
                f"{row.where}: column {self._prompt!r} must be text or messages, with a question; got {value!r:.80}"
            )
        self._require_images(row, text, images)
        _check_json(row, extra | answer)
        try:
            prompt = make_prompt(
                self._task,
                text,
                answer,
                extra=extra | {ROW: row.where},
                images=images,
                templated=self._write.by_template if is_messages else None,
            )
            if self._by_text:
                right_answers(answer["answer"])
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"{row.where}: {error}") from error
        return prompt

    def _answer_of(self, row: Row) -> dict[str, Any]:
        """The answer and the columns of the options, which are part of the prompt's identity."""
        column, options = self._answer, self._options
        if column is None:
            raise ConfigError(
                f"{row.where}: no answer in any of {', '.join(ANSWER_COLUMNS)}; "
                f"set task.options.answer_column (bapo reward test: --answer-column). The row has {list(row.values)}"
            )
        if not row.has(column):
            raise ConfigError(
                f"{row.where}: column {column!r} is missing or null: no answer. It has {list(row.values)}"
            )
        answer = row.get(column)
        if self._by_text and _has_fields(answer):
            raise ConfigError(
                f"{row.where}: column {column!r} is {str(answer)[:60]}, with fields, so no response can equal it; "
                f"take one, task.options.answer_column = {column + '.FIELD'!r}, or write a reward (docs/your_task.md)"
            )
        extra = (*options.extra_columns, *filter(None, [options.expert_column]))
        return {"answer": answer, **{name: row.get(name) for name in extra}}

    def _for_reward_of(self, row: Row) -> Iterator[tuple[str, Any]]:
        """The columns that the reward asks for; of those that it does not name, the ones that are JSON values."""
        for name, value in row.values.items():
            if name not in (self._prompt, self._options.images_column) and (
                name in self._for_reward or (ALL in self._for_reward and _is_json(value))
            ):
                yield name, value
        # The answer under the column's own name too: TRL's functions ask for `solution`, not for `answer`.
        column = str(self._answer)
        own_name = () if column == "answer" or "." in column else (column,)
        for name in (*ANSWER_COLUMNS.get(column, ()), *own_name):
            if row.has(name):
                yield name, row.get(name)

    def _value_of(self, row: Row) -> Any:
        """The column's own value, with images as `<image>`."""
        value = row.get(self._prompt)
        has_images = self._options.images_column is not None and isinstance(value, list)
        return [in_words(message) for message in value] if has_images else value

    def _asked(self, value: Any) -> Any:
        """Prompt of a row: text, or messages if the row has them or the options build them."""
        options = self._options
        if isinstance(value, str):
            value = options.question_format.replace(QUESTION, value)
        if isinstance(value, str) and options.chat:
            value = [{"role": "user", "content": value}]
        if options.system_prompt is None or not isinstance(value, list):
            return value
        has_one = any(isinstance(message, Mapping) and message.get("role") == "system" for message in value)
        return value if has_one else [{"role": "system", "content": options.system_prompt}, *value]

    def _plain(self, row: Row, value: Any) -> Any:
        if self._options.system_prompt is not None:
            raise ConfigError(
                f"{row.where}: a plain-text prompt cannot have a system message: set task.options.chat = true to "
                "convert it to a message, or remove system_prompt"
            )
        return value

    def _images_of(self, row: Row) -> list[str]:
        """Digests of the row's images, which are stored."""
        column = self._options.images_column
        if column is None or (not row.has(column) and IMAGE not in str(row.get(self._prompt))):
            return []  # also for a row without images among others
        value, where = row.get(column), f"{row.where}: column {column!r}"
        return [self._images.add(one, where, self._folder) for one in (value if isinstance(value, list) else [value])]

    def _require_images(self, row: Row, text: str, images: Sequence[str]) -> None:
        column = self._options.images_column
        if column is not None and text.count(IMAGE) != len(images):
            raise ConfigError(
                f"{row.where}: the prompt has {text.count(IMAGE)} {IMAGE} for {len(images)} images in column "
                f'{column!r}; write one per image (task.options.question_format = "{IMAGE}{{prompt}}" adds it)'
            )


class Conversations:
    """Writes messages (verl, SkyRL, TRL) as the text that the model reads."""

    def __init__(self, options: DatasetOptions, context: TaskContext, column: str) -> None:
        """`column`: of the messages."""
        self._options, self._column, self._for_agents = options, column, context.for_agents
        self._tokenizer = options.tokenizer or context.tokenizer

    def __call__(self, row: Row, messages: Sequence[Any]) -> str:
        """Raises: ConfigError that names the row."""
        for message in messages:
            is_message = isinstance(message, Mapping)
            if not is_message or not all(isinstance(message.get(key), str) for key in ("role", "content")):
                where = f"{row.where}: column {self._column!r}"
                raise ConfigError(f"{where}: a message needs role and content, got {message!r:.80}")
        if self._for_agents and is_open(messages):
            raise ConfigError(
                f"{row.where}: the conversation ends with an assistant's message, which the model is to continue; with "
                "[agents] it is not: their address closes it and opens another. Remove the message"
            )
        try:
            if self._template is not None:
                return self._template(messages)
            return written_open(self._formatted, messages) if is_open(messages) else self._formatted(messages)
        except ConfigError as error:
            raise ConfigError(f"{row.where}: {error}") from error

    @property
    def by_template(self) -> bool:
        """Whether the model's chat template writes them; else `message_format`."""
        return self._template is not None

    @cached_property
    def _template(self) -> Render | None:
        """Looked for at the first conversation: prompts that are texts need no tokenizer."""
        options = self._options
        if options.message_format is not None or self._tokenizer is None:
            return None
        found = chat_template(self._tokenizer, options.chat_options, today=options.chat_date)
        if found is None and options.chat:
            raise ConfigError(
                f"task.options.chat: the tokenizer of {self._tokenizer} has no chat template; remove chat, or set "
                "task.options.message_format"
            )
        log.info("conversations are formatted %s", "by the chat template" if found else "without a chat template")
        return found

    def _formatted(self, messages: Messages) -> str:
        return "".join(self._message(message) for message in messages)

    def _message(self, message: Mapping[str, str]) -> str:
        form = self._options.message_format or MESSAGE_FORMAT
        try:
            return form.format(role=message["role"], content=message["content"])
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"task.options.message_format {form!r} cannot be filled: {error!r}; "
                "its fields are {role} and {content}"
            ) from error


def _has_question(value: str | Messages) -> bool:
    """Whether a text says anything; of messages, whether any does and every one of the user does."""
    if isinstance(value, str):
        return bool(value.strip())
    said = [(message["role"], message["content"].strip()) for message in value]
    return any(content for _, content in said) and all(content for role, content in said if role == "user")


def _has_fields(answer: Any) -> bool:
    return isinstance(answer, Mapping) or (isinstance(answer, list) and any(map(_has_fields, answer)))


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _check_json(row: Row, answer: Mapping[str, Any]) -> None:
    """A prompt travels as JSON values, and its id is the hash of its JSON."""
    try:
        json.dumps(answer, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{row.where}: the answer must consist of JSON values: {error}") from error
