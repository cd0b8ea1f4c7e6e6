"""Rows of a local parquet or jsonl file, or of a Hugging Face dataset, and which columns hold prompt and answer.

Layouts that are recognised by their columns: native (`prompt`, `answer`), verl (`prompt`, `reward_model.ground_truth`),
SkyRL (`prompt`, `reward_spec.ground_truth`) and TRL (`prompt`, `solution`). Each malformed row is named by file and row
number, counted from 1.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bapo.errors import ConfigError

ANSWER_COLUMNS: dict[str, tuple[str, ...]] = {
    "answer": (),
    "reward_model.ground_truth": ("data_source", "ability", "extra_info"),
    "reward_spec.ground_truth": ("data_source", "env_class", "extra_info"),
    "solution": (),
}
"""Native, verl, SkyRL, TRL: the first that a row has is taken; with the columns that the layout's rewards ask for."""
_OTHER_FILES = frozenset({".json", ".csv", ".tsv", ".txt", ".arrow", ".gz", ".zst"})
"""Endings that are files and never Hub ids: no message about a missing package for them."""
MOST_LINE_BYTES = 64 << 20
ROWS_AT_ONCE = 64
"""Of a parquet file: columns that nobody asked for become Python's values with the others, and 50 kB of a file may hold
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
        """Whether `get` would find something."""
        return self._find(column) is not None

    def _find(self, column: str) -> Any:
        if column in self.values:
            return self.values[column]
        value: Any = self.values
        for part in column.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


def read_rows(source: str) -> Iterator[Row]:
    """The rows of a file, or of a Hub dataset written as "owner/name" or "owner/name:split".

    Raises: ConfigError, also while iterating, for a file that is missing or malformed.
    """
    path = Path(source)
    readers = {".parquet": _parquet_rows, ".jsonl": _jsonl_rows}
    if path.suffix in readers:
        if not path.is_file():
            raise ConfigError(f"dataset file {source} does not exist (looked in {Path.cwd()})")
        return readers[path.suffix](path)
    hub_id = _HUB_ID.fullmatch(source)
    if hub_id is None or path.exists() or path.suffix in _OTHER_FILES:
        raise ConfigError(f"dataset {source!r} is neither a .parquet or .jsonl file nor a Hub id like owner/name:split")
    return _hub_rows(hub_id[1], hub_id[2] or "train")


def answer_column(row: Row) -> str:
    """Which known layout `row` has. Raises: ConfigError if none."""
    for column in ANSWER_COLUMNS:
        if row.has(column):
            return column
    raise ConfigError(
        f"{row.where}: no answer in any of {', '.join(ANSWER_COLUMNS)}; "
        f"name it in task.options.answer_column. The row has {list(row.values)}"
    )


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with _opened(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_LINE_BYTES + 1), b""), start=1):
            if not line.strip():
                continue
            where = f"{path} row {number}"
            if len(line) > MOST_LINE_BYTES:
                raise ConfigError(f"{where}: it has more than {MOST_LINE_BYTES} bytes; each row is a line of its own")
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
        raise ConfigError(f"dataset file {path} cannot be read: {error.strerror}") from error


def _parquet_rows(path: Path) -> Iterator[Row]:
    # By name: pyarrow has no types, and only the reader of a parquet file should pay for its import.
    parquet = importlib.import_module("pyarrow.parquet")
    arrow = importlib.import_module("pyarrow")
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=ROWS_AT_ONCE):
            for values in batch.to_pylist():
                number += 1
                yield Row(where=f"{path} row {number}", values=values)
    except (arrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: not a readable parquet file (after row {number}): {error}") from error


def _hub_rows(name: str, split: str) -> Iterator[Row]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ConfigError(
            f"dataset {name!r} is a Hub id and needs the package `datasets` (pip install datasets), "
            "or save it as a parquet or jsonl file and give the file's path"
        ) from error
    try:
        rows = datasets.load_dataset(name, split=split)
    except Exception as error:
        raise ConfigError(f"dataset {name!r} split {split!r} could not be loaded: {error}") from error
    for number, values in enumerate(rows, start=1):
        yield Row(where=f"{name}:{split} row {number}", values=values)
