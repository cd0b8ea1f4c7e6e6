"""The run directory: files written by a run, and how to read them.

    RUN/config.toml                     the resolved config
        run.json                        ids, process ids, addresses, versions, commit, status
        prometheus.json                     addresses of its processes, for Prometheus (services/launcher/targets.py)
        inputs.json                     digests of what it trains on (services/launcher/doctor/inputs.py)
        metrics.jsonl                   one object per learner step
        evaluations.jsonl               one object per evaluated held-out split and version
        groups/step-000012.parquet      one row per GroupResult: every group read by the assembly of step 12
        batches/step-000012.frame       the batch of step 12, with its tokens (checkpoint.keep_batches)
        token_records/step-000012.parquet   texts and token values of step 12 (responses.py)
        diverged/step-000012.frame      a batch with a non-finite loss or gradient
        images/<sha256>                 images of prompts, PNG or JPEG (images.py)
        segments/                       responses paused at rollout.generation_budget (partial rollouts)
        weights/  checkpoints/step-000010/  logs/<process>.log  ports/<process>  redis/  report.html

Crash safety of files: `bapo.runtime.run_directory.files`. Contents of a checkpoint: learner/checkpoint.py.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

import psutil

from bapo.core.codec import result_from_map
from bapo.core.errors import ConfigError, ContractError, RecordError
from bapo.core.types import GroupResult
from bapo.runtime.run_directory.files import (
    append_line,
    keep_lines,
    read_content,
    read_lines,
    replace_file,
    storing,
    to_disk,
)
from bapo.runtime.run_directory.images import FOLDER as IMAGES
from bapo.runtime.run_directory.images import ImageFiles
from bapo.runtime.run_directory.responses import TokenFiles
from bapo.runtime.run_directory.rows import (
    EvaluationRow,
    MetricsRow,
    RunRow,
    WholeEvaluationRow,
    WholeMetricsRow,
    object_of,
)

FORMAT = 1
"""Format number of the run directory (`format` in run.json), increased on incompatible changes."""
UNDER_WAY = ("starting", "running")
"""Values of `status` in run.json for a run that is in progress."""
OTHERWISE = {
    "evaluate": "It is an evaluation: bapo eval measures again",
    "buffer": "Start it again with everything it stores: bapo up buffer --run {path}",
}
"""How what does not train is continued, by the launcher's verb."""
VERBS = ("train", "up", *OTHERWISE)
EXPORT_FAILED = "export_failed.txt"
"""In a checkpoint: why its model was not exported."""
_STEP = re.compile(r"step-(\d{6,})")
_FOLDERS = ("groups", "weights", "checkpoints", "logs", "ports", "redis")


class RunDirectory:
    """A run directory. Any process may open it; each file has one writer."""

    def __init__(self, path: str | Path) -> None:
        """`path` may not exist yet; `create` and `open` check."""
        self.path = Path(path)

    @classmethod
    def create(cls, path: str | Path, config_toml: str = "") -> Self:
        """Create the folders of a new run and write its resolved config.

        Raises: ConfigError if the folder already exists; StorageError.
        """
        run = cls(path)
        with storing(run.path):
            try:
                run.path.mkdir(parents=True)
            except FileExistsError as error:
                raise ConfigError(
                    f"run directory {run.path} already exists; resume it with `bapo train --resume {run.path}`, or "
                    "choose another name with `--run.name NAME` (`--run.name auto` appends a number)"
                ) from error
            for folder in _FOLDERS:
                (run.path / folder).mkdir()
            replace_file(run.config_path, config_toml.encode())
        return run

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open an existing run. Raises: ConfigError if it is not a run directory, or has another format."""
        run = cls(path)
        if not run.config_path.is_file():
            raise ConfigError(f"{run.path} is not a run directory: it has no config.toml")
        if (found := run.read_run().get("format", FORMAT)) != FORMAT:
            raise ConfigError(f"{run.path} has format {found}, but this version supports format {FORMAT}")
        return run

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def config_path(self) -> Path:
        return self.path / "config.toml"

    @property
    def weights_path(self) -> Path:
        return self.path / "weights"

    @property
    def images(self) -> ImageFiles:
        return ImageFiles(self.path / IMAGES)

    @property
    def redis_path(self) -> Path:
        """Folder of the embedded Redis: its append-only file."""
        return self.path / "redis"

    @property
    def report_path(self) -> Path:
        """The page of the run as one file."""
        return self.path / "report.html"

    def log_path(self, process: str) -> Path:
        return self.logs_path / f"{process}.log"

    @property
    def logs_path(self) -> Path:
        """Folder of the logs of all processes and workers."""
        return self.path / "logs"

    # -- run.json and ports

    def read_run(self) -> dict[str, Any]:
        """Fields of run.json; empty before the first update. Raises: RecordError, StorageError."""
        path = self.path / "run.json"
        if not os.path.lexists(path):
            return {}
        return object_of(read_content(path), str(path), RunRow)

    @property
    def is_new(self) -> bool:
        """Whether nothing of a run has been written but its config, and what was printed."""
        folders = (self.path / folder for folder in _FOLDERS if folder != "logs")
        return not self.read_run() and not any(any(folder.glob("*")) for folder in folders)

    @property
    def is_under_way(self) -> bool:
        """Whether the run is in progress, by its status. If it was started on this machine, its launcher is alive."""
        fields = self.read_run()
        return fields.get("status") in UNDER_WAY and (not _was_started_here(fields) or _is_there(fields.get("pid")))

    @property
    def status(self) -> str | None:
        """`status` in run.json, but "failed" for a run in progress whose launcher is gone; None before the first
        start."""
        status = self.read_run().get("status")
        if status not in UNDER_WAY or self.is_under_way:
            return status
        status = self.read_run().get("status")  # a launcher that has just exited wrote the last one before
        return "failed" if status in UNDER_WAY else status

    @property
    def runs_here(self) -> bool:
        """Whether the run is in progress on this machine."""
        return self.is_under_way and _was_started_here(self.read_run())

    def update_run(self, **fields: Any) -> None:
        """Set fields of run.json (the launcher is its only writer, after `bapo create`). Raises: StorageError."""
        merged = {"format": FORMAT} | self.read_run() | fields
        path = self.path / "run.json"
        with storing(path):
            replace_file(path, json.dumps(merged, indent=2).encode() + b"\n")

    def write_port(self, process: str, port: int) -> None:
        """Announce the port of this process (for a configured port 0). Raises: StorageError."""
        path = self.path / "ports" / process
        with storing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, f"{port}\n".encode())

    def read_port(self, process: str) -> int | None:
        """The announced port of a process; None if there is none."""
        path = self.path / "ports" / process
        return int(path.read_text()) if path.exists() else None

    # -- lines

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Append the metrics of a learner step. Raises: StorageError."""
        append_line(self.path / "metrics.jsonl", row)

    def append_evaluation(self, row: Mapping[str, Any]) -> None:
        """Append the evaluation of a split. Raises: StorageError."""
        append_line(self.path / "evaluations.jsonl", row)

    def read_metrics(self, *, whole: bool = False) -> list[dict[str, Any]]:
        """All steps so far, in order.

        Args:
            whole: reject rows without the fields required for reports and comparisons.
        Raises: RecordError for a damaged line, except a torn last one; StorageError.
        """
        return read_lines(self.path / "metrics.jsonl", WholeMetricsRow if whole else MetricsRow)

    def read_evaluations(self, *, whole: bool = False) -> list[dict[str, Any]]:
        """All evaluations so far, in order; `whole` and errors as in `read_metrics`."""
        return read_lines(self.path / "evaluations.jsonl", WholeEvaluationRow if whole else EvaluationRow)

    # -- groups

    def write_groups(self, step: int, results: Sequence[GroupResult]) -> None:
        """Write one row per group read by the assembly of `step`. Raises: StorageError."""
        import pyarrow.parquet  # imported late: takes 0.2 s

        path = self._groups_path(step)
        temporary = path.with_suffix(".tmp")
        with storing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            pyarrow.parquet.write_table(_table_of(step, results), temporary)
            os.replace(temporary, path)

    def group_steps(self) -> list[int]:
        return sorted(_steps_in(self.path / "groups"))

    def read_groups(self, steps: Iterable[int] | None = None) -> Iterator[tuple[int, list[GroupResult]]]:
        """(step, its results in assembly order), for these steps or all. Raises: RecordError."""
        import pyarrow.parquet

        for step in self.group_steps() if steps is None else steps:
            path = self._groups_path(step)
            try:
                rows = pyarrow.parquet.read_table(path).to_pylist()
            except (pyarrow.ArrowException, OSError, TypeError, ValueError) as error:
                raise RecordError(f"{path} is damaged: {type(error).__name__}: {error}") from error
            yield step, [_result_of(row, f"{path} row {number}") for number, row in enumerate(rows, start=1)]

    def make_durable(self, steps: Iterable[int]) -> None:
        """fsync the records of these steps. Raises: StorageError."""
        files = (self.path / "metrics.jsonl", *map(self._groups_path, steps))
        with storing(self.path):
            for path in (*files, self.path / "groups", self.path):
                if path.exists():
                    to_disk(path)

    def _groups_path(self, step: int) -> Path:
        return self.path / "groups" / f"step-{step:06d}.parquet"

    # -- batches

    def write_batch(self, step: int, frame: bytes | memoryview) -> None:
        """Store the batch of a step for replays. Raises: StorageError."""
        path = self.batch_path(step)
        with storing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, frame)

    def batch_path(self, step: int) -> Path:
        return self.path / "batches" / f"step-{step:06d}.frame"

    def diverged_path(self, step: int) -> Path:
        return self.path / "diverged" / f"step-{step:06d}.frame"

    def batch_steps(self) -> list[int]:
        return sorted(_steps_in(self.path / "batches"))

    def forget_batches(self, through: int) -> None:
        """Delete the stored batches of steps up to and including `through`. Raises: StorageError."""
        with storing(self.path / "batches"):
            for step in self.batch_steps():
                if step <= through:
                    self.batch_path(step).unlink()

    @property
    def token_files(self) -> TokenFiles:
        return TokenFiles(self.path)

    # -- checkpoints

    def checkpoint_dir(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step-{step:06d}"

    def checkpoint_steps(self) -> list[int]:
        """Steps with a complete checkpoint, in order. `state.json` is written last, so it marks a complete one."""
        steps = _steps_in(self.path / "checkpoints")
        return sorted(step for step in steps if (self.checkpoint_dir(step) / "state.json").is_file())

    def latest_checkpoint(self) -> int | None:
        """Latest complete checkpoint; None if there is none."""
        return max(self.checkpoint_steps(), default=None)

    @property
    def resume_point(self) -> str:
        """Where a resumed run begins and what it repeats, in words."""
        step = self.latest_checkpoint() or 0
        start = f"from the checkpoint of step {step}" if step else "from step 1, as it has no checkpoint yet"
        with suppress(RecordError):  # damaged: resuming reports it
            rows = self.read_metrics()
            num_repeated = rows[-1]["step"] - step if rows else 0
            if num_repeated > 0:
                steps = "1 finished step is" if num_repeated == 1 else f"{num_repeated} finished steps are"
                return f"{start} ({steps} repeated{'' if step else ' with the same batches'})"
        return start

    @property
    def is_of_training(self) -> bool:
        """Whether `bapo train --resume` continues it: not if it is of `bapo eval` or `bapo up buffer` alone."""
        # The buffer of a run that has trained may have been served last.
        return self._verb not in OTHERWISE or bool(self.checkpoint_steps() or self.read_metrics())

    @property
    def _verb(self) -> str:
        """What the launcher was started for last."""
        return next((word for word in self.read_run().get("command") or () if word in VERBS), "")

    @property
    def how_to_resume(self) -> str:
        """The command that continues the run, as a sentence."""
        if not self.is_of_training:
            return OTHERWISE[self._verb].format(path=self.path)
        return f"Resume {self.resume_point}: bapo train --resume {self.path}"

    def truncate_after(self, step: int, *, keep_evaluations: bool = False) -> None:
        """Delete records of steps after `step`, and evaluations of their weights.

        A run resumed from the checkpoint of `step` writes them again. Idempotent. Also deletes incomplete checkpoints
        of a killed learner.
        `keep_evaluations`: the file is in use by a running evaluator.
        Raises: StorageError.
        """
        keep_lines(self.path / "metrics.jsonl", lambda row: row["step"] <= step)
        if not keep_evaluations:
            keep_lines(self.path / "evaluations.jsonl", lambda row: row["version"] <= step + 1)
        with storing(self.path / "groups"):
            for later in self.group_steps():
                if later > step:
                    self._groups_path(later).unlink()
        self.token_files.truncate_after(step)
        with storing(self.path / "batches"):
            for later in self.batch_steps():
                if later > step:
                    self.batch_path(later).unlink()
            for torn in (self.path / "batches").glob(".*.tmp"):
                torn.unlink(missing_ok=True)
        for partial in (self.path / "checkpoints").glob("*.partial"):
            shutil.rmtree(partial, ignore_errors=True)
        # Segments sampled with weights of the abandoned steps, which will be trained again.
        shutil.rmtree(self.path / "segments", ignore_errors=True)


def _was_started_here(fields: Mapping[str, Any]) -> bool:
    return fields.get("host") in (None, platform.node())


def _is_there(pid: Any) -> bool:
    try:
        return isinstance(pid, int) and psutil.pid_exists(pid)
    except OverflowError:  # larger than any process id: not written by a launcher
        return False


def _steps_in(folder: Path) -> Iterator[int]:
    for entry in folder.iterdir() if folder.is_dir() else ():
        match = _STEP.fullmatch(entry.name.removesuffix(".parquet").removesuffix(".frame"))
        if match:
            yield int(match.group(1))


def _table_of(step: int, results: Sequence[GroupResult]) -> Any:
    """[N] results as a table: `step`, then the fields of GroupResult in their order."""
    import pyarrow

    arrow = {
        str: pyarrow.string(),
        bytes: pyarrow.list_(pyarrow.uint8()),
        int: pyarrow.int32(),
        float: pyarrow.float32(),
        Mapping: pyarrow.string(),  # as JSON: the package datasets reads no maps
    }
    columns = [pyarrow.array([step] * len(results), arrow[int])]
    for name, (kind, is_list) in _RESULT_COLUMNS.items():
        plain = pyarrow.float64() if name == "claimed_at" else arrow[kind]  # Unix time needs the digits
        values = [getattr(result, name) for result in results]
        if kind is bytes:
            values = [list(value) for value in values]
        if kind is Mapping:
            values = [json.dumps(dict(value)) for value in values]
        columns.append(pyarrow.array(values, pyarrow.list_(plain) if is_list else plain))
    return pyarrow.table(columns, names=["step", *_RESULT_COLUMNS])


def _column_kind(hint: Any) -> tuple[Any, bool]:
    """(plain type, whether a column holds lists of it) of an annotation: `tuple[int, ...] | None` -> (int, True)."""
    if get_origin(hint) is Literal:
        return str, False
    if get_origin(hint) is Mapping:
        return Mapping, False
    if arguments := get_args(hint):
        kind, is_list = _column_kind(arguments[0])
        return kind, is_list or get_origin(hint) is tuple
    return next(kind for kind in (str, bytes, int, float) if issubclass(hint, kind)), False


_RESULT_COLUMNS = {name: _column_kind(hint) for name, hint in get_type_hints(GroupResult).items()}


def _result_of(row: dict[str, Any], where: str) -> GroupResult:
    """Raises: RecordError."""
    details = row.get("reward_details") or "{}"  # absent from older files
    try:
        known = {name: value for name, value in row.items() if name in _RESULT_COLUMNS}
        return result_from_map({"outcomes": (), **known, "reward_details": json.loads(details)})
    except (ContractError, ValueError) as error:
        raise RecordError(f"{where}: {error}") from error
