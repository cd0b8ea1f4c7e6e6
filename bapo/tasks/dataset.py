"""Task `dataset`: prompts and answers from a file or a Hub dataset, graded by exact match or by a custom function.

    [task]
    name = "dataset"
    options = { path = "train.parquet", held_out = { test = "test.parquet" }, reward = "my_rewards.py:score" }

A prompt that is a list of messages is rendered with the model's chat template. If the assistant's message is the last,
the model continues it: rewards read it with the response, and a gold or expert solution may contain it. Images are
kept in memory, encoded. Not supported: streaming.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from bapo.core.errors import ConfigError, did_you_mean
from bapo.core.types import Prompt
from bapo.tasks.answer_formats import marks_of, written_answer
from bapo.tasks.base import IMAGE, MESSAGES, ROW, beginning_of, make_prompt, whole_responses
from bapo.tasks.chat import CHAT_DATE, Messages, Render, chat_template, is_open, written_open
from bapo.tasks.images import Images, in_words
from bapo.tasks.rewards import Reward, load_reward, reward_columns
from bapo.tasks.right_answers import as_text, exact_texts, folded, gold_text, is_list_in_text, right_answers
from bapo.tasks.user_functions import ALL

log = logging.getLogger(__name__)

NAME = "dataset"
TRAIN = "train"
QUESTION = "{prompt}"
MESSAGE_FORMAT = "{content}\n"
"""For models without a chat template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Columns of a row, and how they are rendered as text."""

    prompt: str | None
    answer: str | None
    """None: each file's own, by its columns that have values (`columns_of_file`)."""
    extra: tuple[str, ...]
    message_format: str | None
    """None: use the chat template."""
    tokenizer: str | None
    """Directory or Hub id with the chat template."""
    chat_options: Mapping[str, Any]
    for_reward: frozenset[str] = frozenset()
    """Columns that the reward asks for, ALL for every one; no part of the prompt's identity."""
    chat_date: str = CHAT_DATE
    question_format: str = QUESTION
    chat: bool = False
    system_prompt: str | None = None
    task: str = NAME
    """What prompts say of who grades them."""
    images: str | None = None
    """Column of the images; None: prompts are text."""
    by_text: bool = False
    """Whether answers are compared as texts, by no function: an answer that is none is then its row's error."""

    def asked(self, value: Any) -> Any:
        """Prompt of a row: text, or messages if the row has them or the options build them."""
        if self.images is not None and isinstance(value, list):
            value = [in_words(message) for message in value]
        if isinstance(value, str):
            value = self.question_format.replace(QUESTION, value)
        if isinstance(value, str) and self.chat:
            value = [{"role": "user", "content": value}]
        if self.system_prompt is None or not isinstance(value, list):
            return value
        has_one = any(isinstance(message, Mapping) and message.get("role") == "system" for message in value)
        return value if has_one else [{"role": "system", "content": self.system_prompt}, *value]


class DatasetTask:
    """Rows as prompts; see `make_task` for the options."""

    def __init__(
        self,
        *,
        sources: Mapping[str, str],
        columns: Columns,
        reward: str | None,
        gold_format: str | None,
        expert_column: str | None = None,
        origins: Mapping[str, str] | None = None,
    ) -> None:
        self._sources = dict(sources)
        self._origins = origins or {}
        self._columns = columns
        self._reward_name = reward
        self._gold_format = gold_format
        self._expert_column = expert_column
        self._images = Images()

    @property
    def name(self) -> str:
        return self._columns.task

    def named(self, name: str) -> DatasetTask:
        """The same under the name of a task that is made of it."""
        self._columns = replace(self._columns, task=name)
        return self

    @property
    def held_out_splits(self) -> tuple[str, ...]:
        return tuple(split for split in self._sources if split != TRAIN)

    def prompts(self, split: str) -> Sequence[Prompt]:
        """All distinct prompts of a split, in file order.

        Raises: ConfigError for an unknown split or a malformed file.
        """
        if split not in self._sources:
            raise ConfigError(
                f"task {self.name} has no split {split!r}{did_you_mean(split, self._sources)}. "
                f"It has {', '.join(self._sources)}"
            )
        return self._splits[split]

    def image(self, digest: str) -> bytes:
        """The file of an image of a prompt that was read. Raises: KeyError."""
        return self._images.image(digest)

    def load_reward(self) -> None:
        """Import the user's reward, if there is one. Raises: ConfigError."""
        _ = self._reward

    def reward(self, prompt: Prompt, text: str) -> float | None:
        """The custom reward; without one, 1.0 if the stripped text is one of the right answers, else 0.0."""
        return self.rewards(prompt, [text])[0]

    def rewards(self, prompt: Prompt, texts: Sequence[str]) -> Sequence[float | None]:
        """Rewards of all responses to a prompt."""
        if self._reward is not None:
            return self._reward.of_group(prompt, texts)
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
        gold = right_answers(answer)[0] if self._columns.by_text else gold_text(answer)
        return _continued(prompt, self._gold_format.replace("{answer}", gold))

    def extract(self, prompt: Prompt, text: str) -> str | None:
        """The part of a response where `gold_format` puts the answer; the whole text for exact match; unknown for a
        custom reward without a format."""
        if self.extracts_by_gold:
            return written_answer(str(self._gold_format), beginning_of(prompt) + text)
        return text.strip() if self._reward_name is None else None

    @property
    def extracts_by_gold(self) -> bool:
        """Whether `gold_format` defines the position of the answer, for any reward."""
        return self._gold_format is not None and marks_of(self._gold_format) is not None

    def expert(self, prompt: Prompt) -> str | None:
        """Value of the column; without a column, the gold response."""
        if self._expert_column is None:
            return self.gold(prompt)
        value = prompt.answer.get(self._expert_column)
        return None if value is None else _continued(prompt, as_text(value))

    @cached_property
    def _reward(self) -> Reward | None:
        """Imported only by graders."""
        return None if self._reward_name is None else load_reward(self._reward_name)

    @cached_property
    def _splits(self) -> dict[str, tuple[Prompt, ...]]:
        """Read together: a held-out prompt that is in the training file as well must not be trained."""
        self._require_files()
        splits = {split: _read_prompts(source, self._columns, self._images) for split, source in self._sources.items()}
        # Without the answer: one data set writes it as 142, the other as 142.0.
        held_out = {_question(prompt) for split in self.held_out_splits for prompt in splits[split].values()}
        leaked = [prompt_id for prompt_id, prompt in splits[TRAIN].items() if _question(prompt) in held_out]
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
            source + (f" ({split} is {self._origins[split]} on the Hugging Face Hub)" if split in self._origins else "")
            for split, source in self._sources.items()
            if is_file(source) and not Path(source).is_file()
        ]
        if missing:
            raise ConfigError(f"dataset file {', '.join(missing)} not found (in {Path.cwd()})")


def make_task(
    *,
    path: str,
    held_out: Mapping[str, str] | None = None,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    extra_columns: Sequence[str] = (),
    message_format: str | None = None,
    tokenizer: str | None = None,
    chat_options: Mapping[str, Any] | None = None,
    chat_date: str = CHAT_DATE,
    question_format: str = QUESTION,
    chat: bool = False,
    system_prompt: str | None = None,
    reward: str | None = None,
    gold_format: str | None = None,
    expert_column: str | None = None,
    origins: Mapping[str, str] | None = None,
    images_column: str | None = None,
    graded_by: str | None = None,
) -> DatasetTask:
    """Create the task from the `[task.options]` table.

    Args:
        path: training data: a .parquet or .jsonl file (relative to the working directory), or a Hub id
            "owner/name:split".
        held_out: name of each held-out split -> its data, written like `path`.
        prompt_column, answer_column: dots step into nested columns; by default each file's own are recognized: the
            first of the known names that has a value in any row.
        extra_columns: further columns that the reward finds in `prompt.answer`, by name. Those that a function of
            columns takes by name or by `**kwargs` are there without it. A column `level` of numbers is the prompt's
            difficulty for selectors that go from easy to hard.
        message_format: how one message of a conversation is written, with the fields {role} and {content}; default:
            the chat template of the tokenizer, and "{content}\\n" where it has none.
        tokenizer: folder or Hub id that has the chat template; default: the model's.
        chat_options: variables of the chat template, such as { enable_thinking = false }; also `tools` and `documents`.
        chat_date: YYYY-MM-DD, for a chat template that prints today's date; fixed, so that prompt ids do not
            change from day to day.
        question_format: what is asked, around the field {prompt}, where prompts are texts.
        chat: a prompt that is text is a message of the user, written by the chat template.
        system_prompt: the first message of conversations that have no system message; texts need `chat`.
        reward: a reward by name (docs/your_task.md); default: exact match of the stripped text with the answer, or with
            any of them where the answer is a list.
        gold_format: a response that the reward calls right, with the field {answer}, e.g. "<answer>{answer}</answer>";
            it also says what the run's page shows as the extracted answer.
        expert_column: an expert's solution of each problem, for methods that train on it; default: the gold response.
        origins: name of a split -> where its file comes from, for the message when it is not there.
        images_column: images of a prompt, one or a list: paths (relative to the data file), or maps with `bytes` or
            `path`. The prompt has one `<image>` per image (docs/images.md).
        graded_by: `[task] reward`, which replaces `reward`; set by `load_task`.
    Raises: ConfigError for an option that makes no sense. Files are read at the first call of `prompts`.
    """
    held_out = held_out or {}
    if TRAIN in held_out:
        raise ConfigError(f"task.options.held_out: {TRAIN!r} is reserved for the training split")
    if "answer" in extra_columns:
        raise ConfigError("task.options.extra_columns: 'answer' is reserved for the answer column")
    if QUESTION not in question_format:
        raise ConfigError(f"task.options.question_format {question_format!r} must contain {QUESTION}")
    if gold_format is None and reward is None:
        gold_format = "{answer}"
    columns = Columns(
        prompt=prompt_column,
        answer=answer_column,
        extra=tuple(dict.fromkeys([*extra_columns, *([expert_column] if expert_column else [])])),
        message_format=message_format,
        tokenizer=tokenizer,
        chat_options=chat_options or {},
        chat_date=chat_date,
        question_format=question_format,
        chat=chat,
        system_prompt=system_prompt,
        images=images_column,
        for_reward=reward_columns(name) if (name := graded_by or reward) else frozenset(),
        by_text=graded_by is None and reward is None,
    )
    return DatasetTask(
        sources={TRAIN: path, **held_out},
        columns=columns,
        reward=reward,
        gold_format=gold_format,
        expert_column=expert_column,
        origins=origins,
    )


def _read_prompts(source: str, columns: Columns, images: Images) -> dict[str, Prompt]:
    """Prompts by id, each once. Raises: ConfigError for a malformed row or a source without rows."""
    prompts: dict[str, Prompt] = {}
    num_rows = 0
    columns = columns_of_file(source, columns)
    write = Conversations(columns)
    for row in read_rows(source):
        num_rows += 1
        prompt = prompt_of(row, columns, write, _images_of(row, columns, images, source))
        prompts.setdefault(prompt.prompt_id, prompt)
    if not prompts:
        raise ConfigError(f"dataset {source} has no rows")
    if num_rows > len(prompts):
        log.warning("dataset %s: dropped %d duplicate rows", source, num_rows - len(prompts))
    _tell_of_other_answers(source, prompts.values())
    if columns.by_text:
        _tell_of_lists(source, prompts.values())
    return prompts


def _tell_of_other_answers(source: str, prompts: Iterable[Prompt]) -> None:
    """Warn of one question with two answers: a response that is right in one row is wrong in the other."""
    first: dict[tuple[str, tuple[str, ...]], Prompt] = {}
    pairs = [(first.setdefault(_question(prompt), prompt), prompt) for prompt in prompts]
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


def _require_no_fields(row: Row, column: str, columns: Columns) -> None:
    """Raises: ConfigError for an answer that is compared as text, and that no response can equal."""
    if columns.by_text and _has_fields(row.get(column)):
        raise ConfigError(
            f"{row.where}: column {column!r} is {str(row.get(column))[:60]}, with fields, so no response can equal it; "
            f"take one, task.options.answer_column = {column + '.FIELD'!r}, or write a reward (docs/your_task.md)"
        )


def _has_fields(answer: Any) -> bool:
    return isinstance(answer, Mapping) or (isinstance(answer, list) and any(map(_has_fields, answer)))


def _question(prompt: Prompt) -> tuple[str, tuple[str, ...]]:
    """What the model reads."""
    return prompt.text, tuple(prompt.images)


def _images_of(row: Row, columns: Columns, images: Images, source: str) -> list[str]:
    """Digests of the row's images, which are stored in `images`."""
    if columns.images is None:
        return []
    if not row.has(columns.images) and IMAGE not in str(row.get(str(columns.prompt))):
        return []  # a row without images among others
    value = row.get(columns.images)
    folder = Path(source).parent if is_file(source) else None
    where = f"{row.where}: column {columns.images!r}"
    return [images.add(one, where, folder) for one in (value if isinstance(value, list) else [value])]


def prompt_of(row: Row, columns: Columns, write: Conversations, images: Sequence[str] = ()) -> Prompt:
    """One row as a prompt. Raises: ConfigError that names the row.

    Args:
        columns: of the row's file (`columns_of_file`).
        images: digests of its images.
    """
    asked, column = str(columns.prompt), columns.answer
    if column is None:
        raise ConfigError(
            f"{row.where}: no answer in any of {', '.join(ANSWER_COLUMNS)}; "
            f"set task.options.answer_column (bapo reward test: --answer-column). The row has {list(row.values)}"
        )
    if not row.has(column):
        raise ConfigError(f"{row.where}: column {column!r} is missing or null: no answer. It has {list(row.values)}")
    _require_no_fields(row, column, columns)
    answer = {"answer": row.get(column), **{name: row.get(name) for name in columns.extra}}
    # The answer under the column's own name too: TRL's functions ask for `solution`, not for `answer`.
    own_name = () if column == "answer" or "." in column else (column,)
    extra = dict(_for_reward(row, columns))
    extra |= {name: row.get(name) for name in (*ANSWER_COLUMNS.get(column, ()), *own_name) if row.has(name)}
    if not row.has(asked):
        raise ConfigError(
            f"{row.where}: column {asked!r} is missing or null; the row has {list(row.values)}. "
            "Name the column of the prompts in task.options.prompt_column (bapo reward test: --prompt-column)"
        )
    value = columns.asked(row.get(asked))
    templated: bool | None = None
    if isinstance(value, list):
        text, templated = write(row, value), write.by_template
        extra[MESSAGES] = value
    else:
        text = value
        if columns.system_prompt is not None:
            raise ConfigError(
                f"{row.where}: a plain-text prompt cannot have a system message: set task.options.chat = true to "
                "convert it to a message, or remove system_prompt"
            )
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{row.where}: column {asked!r} must be text or messages, got {value!r:.80}")
    if columns.images is not None and text.count(IMAGE) != len(images):
        raise ConfigError(
            f"{row.where}: the prompt has {text.count(IMAGE)} {IMAGE} for {len(images)} images in column "
            f'{columns.images!r}; write one per image (task.options.question_format = "{IMAGE}{{prompt}}" adds it)'
        )
    _check_json(row, extra | answer)
    try:
        prompt = make_prompt(
            columns.task, text, answer, extra=extra | {ROW: row.where}, images=images, templated=templated
        )
        if columns.by_text:
            right_answers(answer["answer"])
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{row.where}: {error}") from error
    return prompt


def _for_reward(row: Row, columns: Columns) -> Iterator[tuple[str, Any]]:
    """The columns that the reward asks for; of those that it does not name, the ones that are JSON values."""
    for name, value in row.values.items():
        if name not in (columns.prompt, columns.images) and (
            name in columns.for_reward or (ALL in columns.for_reward and _is_json(value))
        ):
            yield name, value


class Conversations:
    """Writes messages (verl, SkyRL, TRL) as the text that the model reads."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    def __call__(self, row: Row, messages: Sequence[Any]) -> str:
        """Raises: ConfigError that names the row."""
        for message in messages:
            is_message = isinstance(message, Mapping)
            if not is_message or not all(isinstance(message.get(key), str) for key in ("role", "content")):
                where = f"{row.where}: column {self._columns.prompt!r}"
                raise ConfigError(f"{where}: a message needs role and content, got {message!r:.80}")
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
        if self._columns.message_format is not None or self._columns.tokenizer is None:
            return None
        found = chat_template(self._columns.tokenizer, self._columns.chat_options, today=self._columns.chat_date)
        if found is None and self._columns.chat:
            raise ConfigError(
                f"task.options.chat: the tokenizer of {self._columns.tokenizer} has no chat template; remove "
                "chat, or set task.options.message_format"
            )
        log.info("conversations are formatted %s", "by the chat template" if found else "without a chat template")
        return found

    def _formatted(self, messages: Messages) -> str:
        return "".join(self._message(message) for message in messages)

    def _message(self, message: Mapping[str, str]) -> str:
        form = self._columns.message_format or MESSAGE_FORMAT
        try:
            return form.format(role=message["role"], content=message["content"])
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"task.options.message_format {form!r} cannot be filled: {error!r}; "
                "its fields are {role} and {content}"
            ) from error


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


def _continued(prompt: Prompt, text: str) -> str:
    """A solution as what follows the beginning of the assistant's message, if there is one."""
    return text.removeprefix(beginning_of(prompt))


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
_OTHER_FILES = frozenset({".json", ".csv", ".tsv", ".txt", ".arrow", ".gz", ".zst"})
"""Endings that are files and never Hub ids: no message about a missing package for them."""
CONVERT_CSV = (
    '. Convert it: python -c "from pyarrow import csv, parquet; '
    "parquet.write_table(csv.read_csv('{source}'), '{stem}.parquet')\""
)
MAX_LINE_BYTES = 64 << 20
ROWS_AT_ONCE = 64
"""Of a parquet file: columns that are not used become Python's values with the others, and 50 kB of a file may hold
a megabyte for each of 20,000 rows."""
_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.\[\]%:-]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row and where it stands."""

    where: str
    """File and row number: the beginning of every message about this row."""
    values: Mapping[str, Any]

    def get(self, column: str) -> Any:
        """The value of a column; dots step into nested columns. Raises: ConfigError if it is missing or null."""
        value = self._find(column)
        if value is None:
            raise ConfigError(f"{self.where}: column {column!r} is missing or null; the row has {list(self.values)}")
        return value

    def has(self, column: str) -> bool:
        return self._find(column) is not None

    def _find(self, column: str) -> Any:
        if column in self.values:
            return self.values[column]
        value: Any = self.values
        for part in column.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


def read_rows(source: str, *, only: Sequence[str] | None = None) -> Iterator[Row]:
    """The rows of a file, or of a Hub dataset written as "owner/name" or "owner/name:split".

    Args:
        only: columns that are needed, where leaving out the others saves work.
    Raises: ConfigError, also while iterating, for a file that is missing or malformed.
    """
    path = Path(source)
    if is_file(source):
        if not path.is_file():
            raise ConfigError(f"dataset file {source} not found (in {Path.cwd()})")
        return _READERS[path.suffix](path, only)
    hub_id = _HUB_ID.fullmatch(source)
    assert hub_id is not None  # is_file refuses anything else
    return _hub_rows(hub_id[1], hub_id[2] or "train", only)


def is_file(source: str) -> bool:
    """Whether the source is written as a file, which may be missing; False: a Hub id. Raises: ConfigError."""
    path = Path(source)
    if path.suffix in _READERS:
        return True
    if _HUB_ID.fullmatch(source) is None or path.exists() or path.suffix in _OTHER_FILES:
        advice = CONVERT_CSV.format(source=source, stem=path.stem) if path.suffix == ".csv" else ""
        raise ConfigError(
            f"dataset {source!r} is neither a .parquet or .jsonl file nor a Hub id like owner/name:split{advice}"
        )
    return False


def columns_of_file(source: str, columns: Columns) -> Columns:
    """`columns` with the names that were not given: alike for all rows of a file, whichever of them are null.

    The answer's stays None where the file has none. Raises: ConfigError for a file that is missing.
    """
    prompts = (columns.prompt,) if columns.prompt else PROMPT_COLUMNS
    answers = (columns.answer,) if columns.answer else tuple(ANSWER_COLUMNS)
    prompt, answer = first_with_values(source, prompts, answers)
    return replace(columns, prompt=prompt or prompts[0], answer=answer or columns.answer)


def first_with_values(source: str, *choices: Sequence[str]) -> list[str | None]:
    """Of each choice the first column that has a value in any row; None where none has.

    Reads no further than it has to: a column is out only when the file's schema, or every row, is without it. A row
    that cannot be read ends the search; whoever reads the rows says what is wrong with it.
    """
    left = [list(names) for names in choices]
    found: list[str | None] = [None] * len(choices)
    rows = read_rows(source, only=[name for names in choices for name in names])
    with suppress(ConfigError):
        for number, row in enumerate(rows):
            if number == 0 and Path(source).suffix != ".jsonl":  # every row has the columns of the schema
                left = [[n for n in names if n in row.values or n.partition(".")[0] in row.values] for names in left]
            for place, names in enumerate(left):
                # What comes before the best so far may have its first value further on.
                if (first := next((name for name in names if row.has(name)), None)) is not None:
                    found[place], left[place] = first, names[: names.index(first)]
            if not any(left):
                break
    return found


def _jsonl_rows(path: Path, _: Sequence[str] | None) -> Iterator[Row]:
    with _opened(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
            if not line.strip():
                continue
            where = f"{path} row {number}"
            if len(line) > MAX_LINE_BYTES:
                raise ConfigError(f"{where}: it has more than {MAX_LINE_BYTES} bytes; each row must be on its own line")
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{where}: not JSON: {error}") from error
            if not isinstance(values, dict):
                raise ConfigError(f"{where}: expected an object with columns, got {type(values).__name__}")
            yield Row(where=where, values=values)


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"cannot read dataset file {path}: {error.strerror}") from error


def _parquet_rows(path: Path, only: Sequence[str] | None) -> Iterator[Row]:
    # By name: pyarrow has no types, and only the reader of a parquet file should pay for its import.
    parquet = importlib.import_module("pyarrow.parquet")
    arrow = importlib.import_module("pyarrow")
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=ROWS_AT_ONCE, columns=only):
            narrow = [field for field in batch.schema if "float" in str(field.type)]
            for values in batch.to_pylist():
                number += 1
                values |= {field.name: _shortest(values[field.name], field.type) for field in narrow}
                yield Row(where=f"{path} row {number}", values=values)
    except (arrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: not a readable parquet file (after row {number}): {error}") from error


def _shortest(value: Any, kind: Any) -> Any:
    """A float of a narrow column as the shortest decimal that stands for it there: float32's 0.1 is 0.1."""
    if isinstance(value, list) and "list" in str(kind).partition("<")[0]:
        return [_shortest(one, kind.value_type) for one in value]
    if isinstance(value, dict):
        return {field.name: _shortest(value[field.name], field.type) for field in kind}
    narrow = {"float": "float32", "halffloat": "float16"}.get(str(kind))
    if value is None or narrow is None:
        return value
    return float(str(getattr(importlib.import_module("numpy"), narrow)(value)))


_READERS: Mapping[str, Callable[[Path, Sequence[str] | None], Iterator[Row]]] = {
    ".parquet": _parquet_rows,
    ".jsonl": _jsonl_rows,
}


def _hub_rows(name: str, split: str, only: Sequence[str] | None) -> Iterator[Row]:
    """Loaded before the first row is read, so that a package or data set that is missing is not an error of a row."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ConfigError(
            f"dataset {name!r} is a Hub id and requires the package `datasets`: pip install datasets; "
            "or save it as a .parquet or .jsonl file and use its path"
        ) from error
    try:
        rows = datasets.load_dataset(name, split=split)
    except Exception as error:  # loading runs the Hub's client and the data set's own reader
        raise ConfigError(f"cannot load dataset {name!r} split {split!r}: {error}") from error
    if only is not None:  # decoding images takes longer than anything else
        tops = {part for name in only for part in (name, name.partition(".")[0])}
        rows = rows.select_columns([column for column in rows.column_names if column in tops])
    return (Row(where=f"{name}:{split} row {number}", values=values) for number, values in enumerate(rows, start=1))
