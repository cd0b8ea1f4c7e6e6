"""The records of a study's finished runs as one file, to publish them or to continue the study elsewhere.

    study.toml, results.jsonl
    runs/<run>/config.toml, run.json, metrics.jsonl, evaluations.jsonl, groups/step-<t>.parquet

Weights, checkpoints, batches, logs and tokens stay where they are, and so does what tables and figures do not read:
the machine in run.json, the per-age diagnostics in metrics.jsonl, the times of groups. A study that finds these records
keeps the runs as finished.
"""

from __future__ import annotations

import io
import json
import lzma
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bapo.analysis.study.plan import PlannedRun, Study
from bapo.analysis.study.state import Results, State, changed, inspect_run
from bapo.core.errors import ConfigError
from bapo.runtime.run_directory.files import ELSEWHERE, append_line, replace_file, storing
from bapo.runtime.run_directory.layout import RunDirectory

OF_THE_MACHINE = frozenset(("command", "pid", "host", "addresses"))
"""Fields of run.json that say something about one machine and nothing about the run."""
DETAILS = ("divergences", "bounds")
"""Fields of a row of metrics.jsonl that are most of its bytes."""
TIMES = ("sample_s", "grade_s", "claimed_at")
"""Columns of a group that do not compress."""
MEMBER = re.compile(
    r"study\.toml|results\.jsonl|"
    r"runs/[a-z0-9][a-z0-9-]*/(config\.toml|run\.json|metrics\.jsonl|evaluations\.jsonl|groups/step-\d{6,}\.parquet)"
)
MEMBER_MAX_BYTES = 1 << 28
"""Larger than any record of a run: such an archive is refused."""


@dataclass(frozen=True, slots=True)
class Moved:
    runs: tuple[str, ...]
    left: tuple[str, ...]
    """Packed: those that are not finished. Unpacked: those that have a directory already."""


def pack(study: Study, path: Path) -> Moved:
    """Write the finished runs to `path`, compressed with xz; the same records give the same bytes.

    Raises: ConfigError when nothing is finished, StorageError.
    """
    found = [inspect_run(run) for run in study.runs]
    finished = [one.run for one in found if one.state is State.FINISHED]
    if not finished:
        raise ConfigError(f"{study.path} has no finished run yet: there is nothing to pack")
    names = {run.name for run in finished}
    rows = [json.dumps(row, separators=(",", ":")) for row in Results(study.path).read() if row["run"] in names]
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:xz", preset=9) as archive:
        _add(archive, "study.toml", study.text.encode())
        _add(archive, "results.jsonl", "".join(f"{row}\n" for row in rows).encode())
        for run in finished:
            for name, record in _records_of(run):
                _add(archive, f"runs/{run.name}/{name}", record)
    with storing(path, when_full=ELSEWHERE):
        replace_file(path, content.getvalue())
    return Moved(tuple(run.name for run in finished), tuple(one.run.name for one in found if one.run.name not in names))


def unpack(path: Path, study: Study) -> Moved:
    """Put the runs of an archive where `study` has its own; a run that has a directory already is not touched.

    Raises: ConfigError when the file is not an archive of this study, or its runs were made with other settings,
        StorageError.
    """
    members = _read(path)
    planned = {run.name: run for run in study.runs}
    packed = sorted({name.split("/")[1] for name in members if name.startswith("runs/")})
    strange = [name for name in packed if name not in planned]
    if strange:
        raise ConfigError(f"{path} has runs that {study.path.name} does not plan: {', '.join(strange)}")
    new = [planned[name] for name in packed if not planned[name].path.exists()]
    rows = _rows(path, members.get("results.jsonl", b""))
    _write_runs(study.path, new, members)
    results = Results(study.path)
    known = {row["run"] for row in results.read()}
    for row in rows:
        if row["run"] not in known and any(row["run"] == run.name for run in new):
            append_line(results.path, row)
    names = tuple(run.name for run in new)
    return Moved(names, tuple(name for name in packed if name not in names))


def _records_of(run: PlannedRun) -> Iterator[tuple[str, bytes]]:
    for path in (run.path / "config.toml", run.path / "evaluations.jsonl"):
        if path.exists():  # a task without held-out splits has no evaluations
            yield path.name, path.read_bytes()
    directory = RunDirectory.open(run.path)
    rows = [{key: value for key, value in row.items() if key not in DETAILS} for row in directory.read_metrics()]
    yield "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode()
    for path in sorted((run.path / "groups").glob("step-*.parquet")):
        yield f"groups/{path.name}", _without_times(path)
    fields = {key: value for key, value in directory.read_run().items() if key not in OF_THE_MACHINE}
    yield "run.json", json.dumps(fields, indent=2).encode() + b"\n"


def _without_times(path: Path) -> bytes:
    """A table of groups as xz packs it best: plain columns, in which prompts that several runs share look the same."""
    import pyarrow as pa  # imported late: every command imports this file, also where there is no pyarrow
    from pyarrow import parquet

    table = parquet.read_table(path)
    for name in TIMES:
        place = table.column_names.index(name)
        table = table.set_column(place, table.field(name), pa.array([0.0] * len(table), table.field(name).type))
    content = io.BytesIO()
    parquet.write_table(table, content, compression="none", use_dictionary=False, write_statistics=False)
    return content.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o644
    archive.addfile(member, io.BytesIO(content))


def _read(path: Path) -> dict[str, bytes]:
    """Members by name, only such as we write: an archive from elsewhere cannot put a file anywhere else."""
    members: dict[str, bytes] = {}
    try:
        with tarfile.open(path, mode="r:xz") as archive:
            for member in archive:
                if not member.isreg() or not MEMBER.fullmatch(member.name) or member.size > MEMBER_MAX_BYTES:
                    raise ConfigError(f"{path}: {member.name!r} is not a record of a study")
                file = archive.extractfile(member)
                assert file is not None
                members[member.name] = file.read()
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
        raise ConfigError(f"{path} is not a readable study archive: {error}") from error
    return members


def _rows(path: Path, lines: bytes) -> list[dict[str, Any]]:
    try:
        rows = [json.loads(line) for line in lines.splitlines()]
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: its results.jsonl is damaged: {error}") from error
    if not all(isinstance(row, dict) and isinstance(row.get("run"), str) for row in rows):
        raise ConfigError(f"{path}: its results.jsonl has a line of an unknown run")
    return rows


def _write_runs(folder: Path, runs: Sequence[PlannedRun], members: Mapping[str, bytes]) -> None:
    """All or none, as far as their settings go: they are written aside, compared with the plan, and then moved."""
    with storing(folder, when_full=ELSEWHERE):
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".unpacked-", dir=folder))
        try:
            for run in runs:
                (aside / run.name / "groups").mkdir(parents=True)
                start = f"runs/{run.name}/"
                for name in (name for name in members if name.startswith(start)):
                    (aside / run.name / name.removeprefix(start)).write_bytes(members[name])
            changed([replace(run, path=aside / run.name) for run in runs])
            for run in runs:
                (aside / run.name).rename(run.path)
        finally:
            shutil.rmtree(aside)
