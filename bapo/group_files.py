"""Groups in a parquet file, one row each, for pandas, datasets and back: `bapo buffer export` and `import`.

The columns have the names of `bapo.types.Group` and of the run's group records (`bapo.records`). Tokens and log-probs
are lists of lists, response by response; `answer` is JSON. `places` says where the buffer had the group.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from bapo.errors import ContractError
from bapo.storage import ELSEWHERE, storing, to_disk
from bapo.types import Group, Outcome, Prompt, Purpose, Timing

ROWS_AT_ONCE = 64

PER_RESPONSE = {"token_ids": pa.int32(), "rollout_logprobs": pa.float32(), "versions": pa.int32()}
"""Columns with one list per response."""
SCHEMA = pa.schema(
    [
        ("group_id", pa.string()),
        ("prompt_id", pa.string()),
        ("prompt", pa.string()),
        ("task", pa.string()),
        ("answer", pa.string()),
        ("purpose", pa.string()),
        ("step", pa.int32()),
        ("label", pa.string()),
        ("worker_id", pa.string()),
        ("rewards", pa.list_(pa.float32())),
        ("outcomes", pa.list_(pa.string())),
        ("prompt_token_ids", pa.list_(pa.int32())),
        *((name, pa.list_(pa.list_(kind))) for name, kind in PER_RESPONSE.items()),
        ("spans", pa.list_(pa.list_(pa.int32()))),
        ("claimed_at", pa.float64()),
        ("sample_s", pa.float64()),
        ("grade_s", pa.float64()),
        ("policy_version", pa.int32()),
        ("num_tokens", pa.int32()),
        ("places", pa.list_(pa.string())),
    ]
)
DERIVED = ("policy_version", "num_tokens", "places")
"""For readers; a file that is read back need not have them."""
OPTIONAL = (*DERIVED, "spans")
"""Columns that a file may lack, or have for some of its rows: several files that were put together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One group of a file."""

    number: int
    """From 1."""
    group: Group
    places: tuple[str, ...]
    """Where it was; empty when the file does not say."""


class GroupWriter:
    """A parquet file that is written in parts and there when the block ends without an error, whole."""

    def __init__(self, path: Path) -> None:
        self._path, self._temporary = path, path.with_name(f".{path.name}.tmp")

    def __enter__(self) -> Self:
        with self._cleared_up():
            self._writer = pq.ParquetWriter(self._temporary, SCHEMA, compression="zstd")
        return self

    @contextmanager
    def _cleared_up(self) -> Iterator[None]:
        """Nothing is left of a file that cannot be written. Raises: StorageError."""
        try:
            with storing(self._path, when_full=ELSEWHERE):
                yield
        except BaseException:
            self._temporary.unlink(missing_ok=True)
            raise

    def write(self, groups: Sequence[Group], places: Sequence[Sequence[str]]) -> None:
        """Rows, in order. Raises: StorageError."""
        with storing(self._path, when_full=ELSEWHERE):
            self._writer.write_table(_table(groups, places))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._cleared_up():
            self._writer.close()
            if error is None:
                to_disk(self._temporary)
                self._temporary.replace(self._path)
            else:
                self._temporary.unlink()


def count_rows(path: Path) -> int:
    """As the file's own end says. Raises: ContractError."""
    with _opened(path) as file:
        return int(file.metadata.num_rows)


def read_groups(path: Path) -> Iterator[Row]:
    """Every row of a file. Raises: ContractError that names the row, or the column, that is wrong."""
    number = 0
    with _opened(path) as file:
        if not file.metadata.num_rows:  # pandas gives the columns of no rows any type
            return
        columns = _checked_columns(path, file.schema_arrow)
        parts = file.iter_batches(batch_size=ROWS_AT_ONCE, columns=columns)
        while part := _next_part(path, number, parts):
            part = _with_types(part)
            for row in range(part.num_rows):
                number += 1
                yield _row(path, number, part, row)


def _next_part(path: Path, number: int, parts: Iterator[pa.RecordBatch]) -> pa.RecordBatch | None:
    try:
        return next(parts, None)
    except (pa.ArrowException, OSError) as error:
        raise ContractError(f"{path} is damaged behind row {number}: {error}") from error


def _opened(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except FileNotFoundError as error:
        raise ContractError(f"there is no file {path}") from error
    except (pa.ArrowInvalid, OSError) as error:
        raise ContractError(f"{path} is not a parquet file: {error}") from error


def _checked_columns(path: Path, found: pa.Schema) -> list[str]:
    missing = [name for name in SCHEMA.names if name not in found.names and name not in OPTIONAL]
    if missing:
        raise ContractError(f"{path} has no column {', '.join(missing)}; `bapo buffer export` writes all of them")
    if twice := [name for name in SCHEMA.names if found.names.count(name) > 1]:
        raise ContractError(f"{path} has more than one column {', '.join(twice)}; leave one of each")
    for name in (name for name in SCHEMA.names if name in found.names):
        is_absent = name in OPTIONAL and pa.types.is_null(found.field(name).type)
        if not is_absent and not _fits(found.field(name).type, SCHEMA.field(name).type):
            hint = " that holds JSON (json.dumps of the object)" if name == "answer" else ""
            wanted = SCHEMA.field(name).type
            raise ContractError(f"{path}: column {name} is {found.field(name).type}, not {wanted}{hint}")
    return [name for name in SCHEMA.names if name in found.names]


def _fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    """By kind: pandas writes int64 where int32 stood, whole numbers where all are whole, other names of list items, and
    no type where all lists of a column are empty, as `spans` are in most files."""
    if _is_list(found) and _is_list(wanted):
        return pa.types.is_null(found.value_type) or _fits(found.value_type, wanted.value_type)
    return _kind(found) == _kind(wanted) or (_kind(found), _kind(wanted)) == ("integer", "number")


def _is_list(type_: pa.DataType) -> bool:
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_))


def _with_types(part: pa.RecordBatch) -> pa.RecordBatch:
    """The part with the type of the schema where a column has none."""
    found = {name: part.column(name) for name in part.schema.names}
    return pa.RecordBatch.from_pydict(
        {name: c.cast(SCHEMA.field(name).type) if _is_untyped(c.type) else c for name, c in found.items()}
    )


def _is_untyped(type_: pa.DataType) -> bool:
    return bool(pa.types.is_null(type_) or (_is_list(type_) and _is_untyped(type_.value_type)))


def _kind(type_: pa.DataType) -> str:
    if _is_list(type_):
        return f"list of {_kind(type_.value_type)}"
    if pa.types.is_integer(type_):
        return "integer"
    if pa.types.is_floating(type_):
        return "number"
    return "text" if pa.types.is_string(type_) or pa.types.is_large_string(type_) else str(type_)


def _row(path: Path, number: int, part: pa.RecordBatch, row: int) -> Row:
    values = {name: part.column(name)[row] for name in part.schema.names}
    fields = {name: value for name, value in values.items() if value.is_valid or name not in OPTIONAL}
    name = None
    try:
        name = fields["group_id"].as_py()
        empty = [column for column, value in fields.items() if not value.is_valid]
        if empty:
            raise ContractError(f"{', '.join(empty)} is empty")  # noqa: TRY301 - named below with its row
        places = tuple(_words("places", fields)) if "places" in fields else ()
        return Row(number=number, group=_group(fields), places=places)
    except (ContractError, ValueError, KeyError, OverflowError, RecursionError, pa.ArrowInvalid) as error:
        raise ContractError(f"row {number} of {path} (group {name}): {error}") from error


def _group(fields: dict[str, Any]) -> Group:
    lengths = _lengths("token_ids", fields)
    if list(_lengths("rollout_logprobs", fields)) != list(lengths):
        raise ContractError("token_ids and rollout_logprobs have other lengths")
    if any(length != 2 for length in _lengths("versions", fields)):
        raise ContractError("versions must be pairs (oldest, newest) per response")
    text = {name: fields[name].as_py() for name in ("group_id", "prompt_id", "prompt", "task", "label", "worker_id")}
    answer = json.loads(fields["answer"].as_py())
    if not isinstance(answer, dict):
        raise ContractError(f"answer must be a JSON object, got {answer!r}")
    return Group(
        group_id=text["group_id"],
        prompt=Prompt(prompt_id=text["prompt_id"], text=text["prompt"], task=text["task"], answer=answer),
        purpose=Purpose(_known("purpose", fields["purpose"].as_py(), [purpose.value for purpose in Purpose])),
        step=fields["step"].as_py(),
        label=text["label"],
        worker_id=text["worker_id"],
        prompt_token_ids=_array("prompt_token_ids", fields["prompt_token_ids"].values, np.int32),
        token_ids=_flat("token_ids", fields, np.int32),
        rollout_logprobs=_flat("rollout_logprobs", fields, np.float32),
        lengths=lengths,
        rewards=_array("rewards", fields["rewards"].values, np.float32),
        outcomes=np.array([_outcome(word) for word in _words("outcomes", fields)], np.uint8),
        versions=_flat("versions", fields, np.int32).reshape(-1, 2),
        spans=_spans(fields) if "spans" in fields else None,
        timing=Timing(**{name: fields[name].as_py() for name in ("claimed_at", "sample_s", "grade_s")}),
    )


def _spans(fields: dict[str, Any]) -> NDArray[np.int32] | None:
    """None: no response was sampled by several versions."""
    if any(length != 2 for length in _lengths("spans", fields)):
        raise ContractError("spans must be pairs (tokens, version)")
    flat: NDArray[np.int32] = _flat("spans", fields, np.int32)
    return flat.reshape(-1, 2) if len(flat) else None


def _outcome(word: str) -> Outcome:
    return Outcome[_known("outcomes", word.lower(), [outcome.name.lower() for outcome in Outcome]).upper()]


def _known(name: str, word: str, known: Sequence[str]) -> str:
    """The word. Raises: ContractError for one that is not known."""
    if word not in known:
        raise ContractError(f"{name}: {word!r} is none of {', '.join(known)}")
    return word


def _words(name: str, fields: dict[str, Any]) -> list[str]:
    """Raises: ValueError for an empty one."""
    found: list[str] = fields[name].as_py()
    if None in found:
        raise ValueError(f"{name}: a word is missing in a list")
    return found


def _lengths(name: str, fields: dict[str, Any]) -> NDArray[np.int32]:
    lengths: NDArray[np.int32] = _array(name, fields[name].values.value_lengths(), np.int32)
    return lengths


def _flat(name: str, fields: dict[str, Any], dtype: Any) -> Any:
    return _array(name, fields[name].values.flatten(), dtype)


def _array(name: str, values: pa.Array, dtype: Any) -> Any:
    """Raises: ValueError for an empty value, pa.ArrowInvalid for a number that does not fit."""
    if count := values.null_count:
        what = "a value is" if count == 1 else f"{count} values are"
        raise ValueError(f"{name}: {what} missing in a list (pandas writes NaN so)")
    return np.ascontiguousarray(values.cast(pa.from_numpy_dtype(dtype)).to_numpy(zero_copy_only=False))


def _table(groups: Sequence[Group], places: Sequence[Sequence[str]]) -> pa.Table:
    columns: dict[str, Any] = {
        "group_id": [group.group_id for group in groups],
        "prompt_id": [group.prompt.prompt_id for group in groups],
        "prompt": [group.prompt.text for group in groups],
        "task": [group.prompt.task for group in groups],
        "answer": [json.dumps(dict(group.prompt.answer)) for group in groups],
        "purpose": [group.purpose.value for group in groups],
        "step": [group.step for group in groups],
        "label": [group.label for group in groups],
        "worker_id": [group.worker_id for group in groups],
        "rewards": [group.rewards for group in groups],
        "outcomes": [[Outcome(value).name.lower() for value in group.outcomes] for group in groups],
        "prompt_token_ids": [group.prompt_token_ids for group in groups],
        "token_ids": _nested([(group.token_ids, group.lengths) for group in groups]),
        "rollout_logprobs": _nested([(group.rollout_logprobs, group.lengths) for group in groups]),
        "versions": _nested([(group.versions.reshape(-1), np.full(group.size, 2)) for group in groups]),
        "spans": [[] if group.spans is None else group.spans.tolist() for group in groups],
        "claimed_at": [group.timing.claimed_at for group in groups],
        "sample_s": [group.timing.sample_s for group in groups],
        "grade_s": [group.timing.grade_s for group in groups],
        "policy_version": [group.policy_version for group in groups],
        "num_tokens": [len(group.token_ids) for group in groups],
        "places": [list(found) for found in places],
    }
    return pa.table(columns, schema=SCHEMA)


def _nested(columns: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> pa.ListArray:
    """[(values of a group [T], lengths of its responses [G])] as lists of lists, without a step per token."""
    values = pa.array(np.concatenate([flat for flat, _ in columns]))
    inner = np.concatenate([lengths for _, lengths in columns])
    outer = [len(lengths) for _, lengths in columns]
    responses = pa.ListArray.from_arrays(_offsets(inner), values)
    return pa.ListArray.from_arrays(_offsets(outer), responses)


def _offsets(lengths: Any) -> pa.Array:
    return pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int32())
