"""From the records of a run to a tracker: each row once, also when the run or the tracker starts again.

RUN/<tracker>/sent.json holds the tracker's own id of the run and how far it is. Steps that a resumed run trains again
are sent only to a tracker that can replace its numbers (TensorBoard); the others keep what they had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from bapo.config.tracking import TrackingConfig
from bapo.core.correctness import ACCURACY, measure_of
from bapo.core.errors import RecordError
from bapo.core.types import Version
from bapo.runtime.run_directory.curves import BASE_VERSION, Row, as_compared
from bapo.runtime.run_directory.files import Lines, locked, read_content, replace_file, storing
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.run_directory.rows import EvaluationRow, MetricsRow, ended_early
from services.trackers.base import TrackedRun, Tracker, load_tracker

POLL_S = 1.0
TRAINING = ""
"""Key of learner steps in `Sent.steps`; held-out splits have their names."""
RESPONSES = "/responses"
"""Key of tables of responses there: no split has this name."""
COLUMNS = ("prompt_id", "prompt", "response", "reward", "advantage", "origin", "outcome", "newest_version")
"""Of a table of responses; meanings: `TokenRow`."""
MAX_ROWS = 256
"""Responses of one table, from the first group of the batch on."""


class Sent(msgspec.Struct):
    """How far a tracker is."""

    project: str
    """Of the tracker; another one gets all rows."""
    tracker_id: str
    num_rows: int = 0
    steps: dict[str, int] = {}
    """Latest step sent, of training and of each held-out split."""


class _MeasuredRow(EvaluationRow, kw_only=True):
    split: str
    step: Version


class Sender:
    """Follows one run. Raises, everywhere: ContractError and StorageError for records that cannot be read."""

    def __init__(self, run: RunDirectory, tracked: TrackedRun, start: Callable[[TrackedRun], Tracker]) -> None:
        """`start`: makes the tracker, or resumes it where `tracked` has its id."""
        self._run, self._tracked, self._start = run, tracked, start
        self._path = tracked.folder / "sent.json"
        self._begin(_read_sent(self._path, tracked.settings.project))

    def _begin(self, sent: Sent | None) -> None:
        tracked = self._tracked
        if sent is not None:
            tracked = replace(tracked, tracker_id=sent.tracker_id, num_sent=sent.num_rows)
        self._tracker = self._start(tracked)
        self._sent = sent or Sent(project=tracked.settings.project, tracker_id=self._tracker.tracker_id or "")
        self._read_from_start()

    def _read_from_start(self) -> None:
        self._has_ended, self._step = False, 0
        self._bases: dict[str, Row] = {}
        self._steps = Lines(self._run.path / "metrics.jsonl", MetricsRow)
        self._measured = Lines(self._run.path / "evaluations.jsonl", _MeasuredRow)

    def send_new(self) -> int:
        """Send the rows that the tracker does not have; the number of rows sent."""
        if self._steps.is_another_file() or self._measured.is_another_file():
            self._read_again()
        num_before = self._sent.num_rows
        for split, step, values in self._rows():
            if step <= self._sent.steps.get(split, -1):
                continue
            self._tracker.log(step, values)
            self._note(split, step)
        self._send_responses()
        return self._sent.num_rows - num_before

    def _send_responses(self) -> None:
        """Tables of steps whose texts are recorded by now: the learner writes them in the background."""
        files, every = self._run.token_files, self._tracked.settings.responses_every
        for step in files.steps() if every else ():
            if step % every == 0 and step > self._sent.steps.get(RESPONSES, 0):
                rows = [{**row, "response": row["text"]} for row in files.read_heads(step)[:MAX_ROWS]]
                self._tracker.log_responses(step, COLUMNS, [[row[name] for name in COLUMNS] for row in rows])
                self._note(RESPONSES, step)

    def _note(self, key: str, step: int) -> None:
        """After a row was sent."""
        self._sent.steps[key] = step
        self._sent.num_rows += 1
        self._save()

    @property
    def has_last_row(self) -> bool:
        """Whether no row will follow: the last step was read, and its weights on each split measured so far."""
        measured = [step for split, step in self._sent.steps.items() if split not in (TRAINING, RESPONSES)]
        is_last = self._has_ended or self._step >= self._num_steps
        return is_last and all(step >= self._step for step in measured)

    @property
    def _num_steps(self) -> int:
        return int(self._tracked.config.get("run", {}).get("num_steps", 0))

    def close(self) -> None:
        """Wait until the tracker has everything."""
        is_complete = self._has_ended or self._sent.steps.get(TRAINING, 0) >= self._num_steps
        self._tracker.close(is_complete=is_complete)

    def _read_again(self) -> None:
        """A resumed run has cut its records back to its checkpoint."""
        if self._tracker.tracker_id is None:
            self._tracker.close(is_complete=False)
            self._begin(None)
        else:
            self._read_from_start()

    def _rows(self) -> Iterator[tuple[str, int, dict[str, float]]]:
        for row in self._steps.read():
            self._has_ended, self._step = bool(ended_early([row])), row["step"]
            yield TRAINING, row["step"], numbers_of(row)
        for row in self._measured.read():
            if row["version"] == BASE_VERSION:
                self._bases[row["split"]] = row
            yield row["split"], row["step"], measured(row, self._bases.get(row["split"]))

    def _save(self) -> None:
        if self._tracker.tracker_id is not None:
            with storing(self._path):
                replace_file(self._path, msgspec.json.encode(self._sent))


def send_run(
    run: RunDirectory, name: str, settings: TrackingConfig, config: Mapping[str, Any], wait: Callable[[float], bool]
) -> Iterator[int]:
    """Send a run to a tracker until the run ends; yields how many rows each poll has sent.

    Args:
        wait: until that many seconds are over; true: stop after one more poll.
    Raises: ConfigError when another process sends this run to this tracker; what the tracker raises.
    """
    folder = run.path / name
    with storing(folder):
        folder.mkdir(exist_ok=True)
    with locked(folder / ".lock", f"another process is already sending {run.path} to {name}"):
        tracked = TrackedRun(name=run.name, folder=folder, settings=settings, config=config)
        sender = Sender(run, tracked, lambda tracked: load_tracker(name, tracked))
        is_last = False
        try:
            while not is_last:
                is_last = _is_over(run, sender) or wait(POLL_S)  # before the rows: what was written until then is sent
                yield sender.send_new()
        finally:
            sender.close()


def _is_over(run: RunDirectory, sender: Sender) -> bool:
    """Whether the run has ended: by its launcher, or by its rows if its processes were started separately."""
    has_launcher = run.read_run().get("status") is not None
    return not run.is_under_way if has_launcher else sender.has_last_row


def numbers_of(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a step except `step`, those of inner maps as `outer/inner`; anything else is left out."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            found.update(numbers_of(value, f"{prefix}{name}/"))
        elif isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63):
            found[f"{prefix}{name}"] = float(value)
    found.pop("step", None)
    return found


def measured(row: Row, base: Row | None = None) -> dict[str, float]:
    """Numbers of an evaluation: its mean reward is also its accuracy where all rewards are 0 or 1.

    Args:
        base: the base model's of this split, with which mean and interval are made comparable (`as_compared`).
    """
    own = ("low", "high", "num_prompts", "mean_tokens", "truncated_share")
    names = {"mean_reward": "accuracy"} | {name: name for name in own}
    if measure_of([row]) == ACCURACY:
        names["accuracy"] = "accuracy"
    row = as_compared(row, base)
    found = {name: float(row[key]) for name, key in names.items() if row.get(key) is not None}
    found |= numbers_of({name: row.get(name) for name in ("reward_parts", "reward_facts")})
    return {f"{row['split']}/{name}": value for name, value in found.items()}


def _read_sent(path: Path, project: str) -> Sent | None:
    """None when nothing was sent to this project. Raises: RecordError for a damaged file, StorageError."""
    if not path.exists():
        return None
    try:
        sent = msgspec.json.decode(read_content(path), type=Sent)
    except msgspec.MsgspecError as error:
        raise RecordError(f"{path} is damaged: {error}; delete it to send all rows again, as a new run") from error
    return sent if sent.project == project else None
