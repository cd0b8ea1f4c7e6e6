"""Rows of a .parquet or .jsonl file, or of a data set of the Hugging Face Hub. Not supported: streaming."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bapo.core.errors import ConfigError

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
            narrow = _narrow(batch.schema)
            for values in batch.to_pylist():
                number += 1
                yield Row(where=f"{path} row {number}", values=values | _shortened(values, narrow))
    except (arrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: not a readable parquet file (after row {number}): {error}") from error


def _narrow(schema: Any) -> dict[str, Any]:
    """The columns with floats of 32 or 16 bits, and their types of Arrow; a float64 is a `double` there."""
    return {field.name: field.type for field in schema if "float" in str(field.type)}


def _shortened(values: Mapping[str, Any], narrow: Mapping[str, Any]) -> dict[str, Any]:
    """These columns of a row, each float as its shortest decimal: float32's 0.1 is 0.1."""
    return {name: _shortest(values[name], kind) for name, kind in narrow.items()}


def _shortest(value: Any, kind: Any) -> Any:
    """A float of a narrow column as the shortest decimal that stands for it there."""
    if "float" not in str(kind):  # the Hub's reader decodes some, such as sound, to values of other fields
        return value
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
    narrow = _narrow(rows.features.arrow_schema)
    return (
        Row(where=f"{name}:{split} row {number}", values=values | _shortened(values, narrow))
        for number, values in enumerate(rows, start=1)
    )
