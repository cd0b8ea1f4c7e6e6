"""Texts and token records: responses and per-token values of the learner, one parquet file per step.

    RUN/token_records/step-000012.parquet   one row per response read by step 12, by group: those of its batch, then
                                            those of groups that did not train

In a step with a token record, text is split into pieces, one per token. Values of tokens that no pass computed
(advantage 0 without KL and entropy) are null. A text-only row has one piece per turn, as graded, and no token values.
The file can be read with pandas and datasets, and is used by the page of a run. Columns of episodes and
`reward_details` (JSON) are in a file only if one of its rows needs them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from bapo.core.errors import ContractError
from bapo.runtime.run_directory.files import storing
from bapo.runtime.run_directory.transcripts import TurnText, num_context, pieces_by_turn

PER_TOKEN = ("token_ids", "pieces", "rollout_logprobs", "logprobs", "entropy", "ratio", "clipped")
"""Columns with one value per token; the last four are null for a response that was not computed, the last five for a
text-only one, which has a single piece."""

PART_TOKENS = 32_768
"""Tokens per row group of a file, the unit of reading. A row group has 8 kB of overhead, so not one per group."""
_NAME = re.compile(r"step-(\d{6,})\.parquet")
_COLUMNS = {
    "step": "int32",
    "group_id": "string",
    "prompt_id": "string",
    "prompt": "string",
    "task": "string",
    "answer": "string",
    "gold": "string",
    "origin": "string",
    "kind": "string",
    "row": "int32",
    "reward": "float32",
    "outcome": "string",
    "oldest_version": "int32",
    "newest_version": "int32",
    "extracted": "string",
    "advantage": "float32",
    "token_ids": "list of int32",
    "pieces": "list of string",
    "rollout_logprobs": "list of float32",
    "logprobs": "list of float32",
    "entropy": "list of float32",
    "ratio": "list of float32",
    "clipped": "list of bool_",
    "images": "list of string",
}
_OF_EPISODES = {"turns": "list of turn", "engine_prompt": "string"}
_OF_REWARDS = {"reward_details": "string"}
_MAY_LACK = {"images", *_OF_EPISODES, *_OF_REWARDS}
"""Columns that a file of an older version, of responses of one turn, or of rewards without details does not have."""
_LIST = "list of "
_LEFT_OUT = b"bapo.groups_left_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One response."""

    step: int
    group_id: str
    """Id of the batch entry; an entry of several stored groups joins their ids."""
    prompt_id: str
    prompt: str
    task: str
    answer: Mapping[str, Any]
    """The answer used for grading."""
    gold: str | None
    """A correct response, if the task has one."""
    origin: str | None
    """x1, x2 or x3; None: the group did not train."""
    kind: str
    """rl, or sft if trained with cross-entropy."""
    row: int
    """Index of the response in the group."""
    reward: float
    outcome: str
    """graded, truncated or expert."""
    oldest_version: int
    newest_version: int
    """Policy versions of its first and last token."""
    extracted: str | None
    """The answer extracted for grading, if the task provides it."""
    advantage: float | None
    """A_j of eq. 2 as used in the loss: with the weights of entry and origin; with a critic, the mean over its tokens.
    None: the group did not train."""
    token_ids: Sequence[int]
    pieces: Sequence[str]
    """Text of each token (a character of several tokens is assigned to the last), or of each turn."""
    rollout_logprobs: Sequence[float] | None
    """log alpha, nats; None: text-only row."""
    logprobs: Sequence[float] | None = None
    """log pi_theta in the last pass of the step, nats."""
    entropy: Sequence[float] | None = None
    """Entropy of pi_theta at this token, in the same pass, nats."""
    ratio: Sequence[float] | None = None
    """rho of the loss in the same pass: pi_theta / its anchor."""
    clipped: Sequence[bool] | None = None
    """Whether clipping changed the objective."""
    images: Sequence[str] = ()
    """Digests of the images of the prompt (RUN/images)."""
    turns: Sequence[TurnText] = ()
    """Of an episode; empty: one turn after the prompt."""
    engine_prompt: str | None = None
    """The prompt of an episode as the engine saw it, with special tokens; None: it is `prompt`."""
    reward_details: Mapping[str, float] = field(default_factory=dict)
    """Components of the reward and facts (`bapo.core.reward_details`)."""

    @property
    def is_text_alone(self) -> bool:
        """Whether the row is text-only."""
        return self.rollout_logprobs is None

    @property
    def pieces_of_turns(self) -> list[Sequence[str]]:
        """Pieces of each turn, at least one turn."""
        return pieces_by_turn(self.pieces, [turn.num_tokens for turn in self.turns])

    @property
    def text(self) -> str:
        """What a reward function reads, the last turn, with special tokens unless it is text-only."""
        return "".join(self.pieces_of_turns[-1])


class TokenFiles:
    """The token records of a run. One process writes, any may read."""

    def __init__(self, run_path: Path) -> None:
        self.path = run_path / "token_records"

    def steps(self) -> list[int]:
        names = (_NAME.fullmatch(entry.name) for entry in (self.path.iterdir() if self.path.is_dir() else ()))
        return sorted(int(match[1]) for match in names if match)

    def write(self, step: int, groups: Sequence[Sequence[TokenRow]], *, left_out: int = 0) -> int:
        """Write a file atomically; returns its size.

        Args:
            left_out: number of groups of the batch that were skipped because of the size limit.
        Raises: StorageError.
        """
        import pyarrow.parquet  # imported late: takes 0.2 s

        path = self._file(step)
        rows = list(chain(*groups))
        more = {
            **(_OF_EPISODES if any(map(_is_of_agent, rows)) else {}),
            **(_OF_REWARDS if any(row.reward_details for row in rows) else {}),
        }
        schema = _schema(left_out, more)
        temporary = path.with_name(f".{path.name}.tmp")
        with storing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with pyarrow.parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
                for part in _parts(groups):
                    writer.write_table(_table(part, schema))
            os.replace(temporary, path)
            return path.stat().st_size

    def read_group(self, step: int, group_id: str) -> list[TokenRow]:
        """The responses of a group, in order; empty if the step has no record of it. Raises: ContractError."""
        path = self._file(step)
        if not path.is_file():
            return []
        written = path.stat().st_mtime_ns
        number = _part_numbers(path, written).get(group_id)
        if number is None:
            return []
        part = _part(path, written, number)
        ids = part["group_id"].to_pylist()
        with _reading(path):
            return [_row(row) for row in part.slice(ids.index(group_id), ids.count(group_id)).to_pylist()]

    def has(self, step: int, group_id: str) -> bool:
        """Whether the step has a record of this group. Raises: ContractError."""
        path = self._file(step)
        return path.is_file() and group_id in _part_numbers(path, path.stat().st_mtime_ns)

    def read_heads(self, step: int) -> list[dict[str, Any]]:
        """All rows without per-token values, but with `text`, all that is shown of the response, and `num_shown`
        (see there). Raises: ContractError."""
        import pyarrow.compute
        import pyarrow.parquet

        path = self._file(step)
        with _reading(path):
            stored = pyarrow.parquet.read_schema(path).names
            known = [name for name in (*_COLUMNS, *_OF_EPISODES, *_OF_REWARDS) if name not in PER_TOKEN]
            columns = [name for name in known if name in stored or name not in _MAY_LACK]
            table = pyarrow.parquet.read_table(path, columns=[*columns, "pieces", "token_ids"])
            sizes = pyarrow.compute.list_value_length(table["token_ids"])
            rows = table.drop_columns(["token_ids"]).append_column("num_shown", sizes).to_pylist()
            return [_head(row) for row in rows]

    def read_untrained(self, step: int) -> list[list[TokenRow]]:
        """Rows of groups that did not train, by group; empty without a file. Raises: ContractError."""
        import pyarrow.compute
        import pyarrow.parquet

        path = self._file(step)
        if not path.is_file():
            return []
        with _reading(path):
            found = pyarrow.parquet.read_table(path, filters=pyarrow.compute.field("origin").is_null()).to_pylist()
        groups: dict[str, list[TokenRow]] = {}
        for row in map(_row, found):
            groups.setdefault(row.group_id, []).append(row)
        return list(groups.values())

    def left_out(self, step: int) -> int:
        """Number of groups of the batch that are not in the file."""
        import pyarrow.parquet

        with _reading(self._file(step)):
            found = pyarrow.parquet.read_schema(self._file(step)).metadata or {}
        return int(found.get(_LEFT_OUT, b"0"))

    def shrink(self, max_bytes: int) -> list[int]:
        """Delete the oldest steps, but never the latest, until the folder has at most `max_bytes`; returns them.

        Raises: StorageError.
        """
        removed: list[int] = []
        with storing(self.path):
            sizes = {step: self._file(step).stat().st_size for step in self.steps()}
            for step in list(sizes)[:-1]:
                if sum(sizes.values()) <= max_bytes:
                    break
                self._file(step).unlink()
                del sizes[step]
                removed.append(step)
        return removed

    def truncate_after(self, step: int) -> None:
        """Delete records of later steps, which a resumed run writes again. Raises: StorageError."""
        with storing(self.path):
            for later in self.steps():
                if later > step:
                    self._file(later).unlink()

    def _file(self, step: int) -> Path:
        return self.path / f"step-{step:06d}.parquet"


assert {field.name for field in fields(TokenRow)} == {*_COLUMNS, *_OF_EPISODES, *_OF_REWARDS}


@lru_cache(maxsize=1024)
def _part_numbers(path: Path, _written: int) -> dict[str, int]:
    """Group id -> row group of a file; cached by mtime, because the page of a prompt reads many files repeatedly."""
    import pyarrow.parquet

    with _reading(path), pyarrow.parquet.ParquetFile(path) as file:
        parts = [
            file.read_row_group(n, columns=["group_id"])["group_id"].to_pylist() for n in range(file.num_row_groups)
        ]
    return {group_id: number for number, ids in enumerate(parts) for group_id in ids}


@lru_cache(maxsize=8)
def _part(path: Path, _written: int, number: int) -> Any:
    """A row group as a table; cached, because an export reads all groups of a step in turn."""
    import pyarrow.parquet

    with _reading(path), pyarrow.parquet.ParquetFile(path) as file:
        return file.read_row_group(number)


def _parts(groups: Sequence[Sequence[TokenRow]]) -> Iterator[list[TokenRow]]:
    """Split into parts of whole groups with at least PART_TOKENS tokens, except the last part."""
    part: list[TokenRow] = []
    for rows in groups:
        part.extend(rows)
        if sum(map(num_shown, part)) >= PART_TOKENS:
            yield part
            part = []
    if part:
        yield part


def _is_of_agent(row: TokenRow) -> bool:
    return len(row.turns) > 0 or row.engine_prompt is not None


def num_shown(row: TokenRow) -> int:
    """Sampled tokens of a response, and approximate tokens of the context between them."""
    return len(row.token_ids) + num_context([turn.context for turn in row.turns])


def _schema(left_out: int, more: Mapping[str, str]) -> Any:
    import pyarrow

    turn = pyarrow.struct([("parent", pyarrow.int32()), ("num_tokens", pyarrow.int32()), ("context", pyarrow.string())])

    def kind(name: str) -> Any:
        of = name.removeprefix(_LIST)
        plain = turn if of == "turn" else getattr(pyarrow, of)()
        return pyarrow.list_(plain) if name.startswith(_LIST) else plain

    columns = [(name, kind(type_)) for name, type_ in {**_COLUMNS, **more}.items()]
    return pyarrow.schema(columns, metadata={_LEFT_OUT: str(left_out).encode()})


def _table(rows: Sequence[TokenRow], schema: Any) -> Any:
    import pyarrow

    columns: dict[str, Any] = {name: [getattr(row, name) for row in rows] for name in schema.names}
    columns["answer"] = [json.dumps(dict(row.answer)) for row in rows]
    if "reward_details" in columns:
        columns["reward_details"] = [json.dumps(dict(row.reward_details)) for row in rows]
    if "turns" in columns:
        columns["turns"] = [[asdict(turn) for turn in row.turns] for row in rows]
    return pyarrow.table(columns, schema=schema)


def _row(fields_: dict[str, Any]) -> TokenRow:
    lists = {
        "images": tuple(fields_.get("images") or ()),  # absent from older files
        "turns": tuple(TurnText(**turn) for turn in fields_.get("turns") or ()),
        "reward_details": json.loads(fields_.get("reward_details") or "{}"),
    }
    return TokenRow(**{**fields_, **lists, "answer": json.loads(fields_["answer"])})


def _head(row: dict[str, Any]) -> dict[str, Any]:
    turns = row.pop("turns", None) or ()
    parts = pieces_by_turn(row.pop("pieces"), [turn["num_tokens"] for turn in turns])
    contexts = [turn["context"] for turn in turns] or [""]
    text = "".join(chain.from_iterable((context, *pieces) for context, pieces in zip(contexts, parts, strict=True)))
    return row | {"text": text, "num_shown": row["num_shown"] + num_context(contexts)}


class _reading:  # noqa: N801 - reads as a verb at its uses
    """Convert pyarrow errors for a damaged or foreign file to a ContractError with its path."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        import pyarrow

        if isinstance(error, pyarrow.ArrowException | OSError | KeyError | TypeError | ValueError):
            raise ContractError(f"{self._path} is not a readable token record: {error}") from error
