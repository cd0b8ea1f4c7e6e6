"""What a run leaves behind beside its buffer: errors in its logs, deaths that nobody inflicted, records with gaps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from bapo.runtime.run_directory.layout import RunDirectory
from tests.full.chaos.faults import ACTOR, DISK, GRADER, GUARD, LEARNER, NODE, REDIS, ROLLOUT_SERVER, Fault, killed_by
from tests.full.chaos.ledger import Line

SHOWN = 5
UNENDED = "a traceback without an end"
_ERROR = re.compile(r"(?:^| )(?:ERROR|CRITICAL) |Task exception was never retrieved|was never awaited|BUG REPORT")
_BEFORE = re.compile(r"^(?:\[rank\d+\]: |[\d-]+ [\d:,]+ )")
"""A time, or what torch writes before the lines of a traceback."""
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\)")
_LAST_OF_TRACEBACK = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Group)\b")
EXCUSED: dict[str, dict[str, str]] = {
    REDIS: {"ASGI callable returned without completing response": "how uvicorn cuts off a body that was begun"},
    DISK: {
        "No space left on device": "whoever writes must say so",
        "StorageError: ": "the log lies on the same disk, and what is said of it may be cut",
        "cannot write to its disk": "Redis refuses, and the run ends with that",
        "RankLostError: ": "a rank whose team-mate has ended with that",
    },
    LEARNER: {
        "RankLostError: ": "a rank whose team has lost a member",
        f"{LEARNER}-1.log: {UNENDED}": "the launcher kills it while it says so",
    },
    GRADER: {"VerifierKilledError": "a worker whose grader dies before both have begun is replaced as a whole"},
    NODE: {"NodeDiedError": "the rollout server ends by an accident when its node has died"},
}
"""Victim -> what a line may say of a fault that befell it -> why. Nothing else may be an error, whatever was killed."""
_DEATH = re.compile(r"^(\w[\w-]*) failed with (signal SIGKILL|exit code [01]); restarting", re.MULTILINE)
BELOW = {GUARD: ROLLOUT_SERVER, NODE: ROLLOUT_SERVER}
"""Victim -> the child of the launcher that ends with it."""


def complaints(logs: Sequence[Path], faults: Sequence[Fault]) -> list[str]:
    """Errors and tracebacks in logs that no fault excuses."""
    befallen = {LEARNER if fault.whom.startswith(LEARNER) else fault.whom for fault in faults}
    excuses = [words for whom, found in EXCUSED.items() if whom in befallen for words in found]
    found = Counter(
        f"{path.name}: {line[:300]}"
        for path in logs
        for line in errors_in(path.read_text(errors="replace").splitlines())
    )
    return [
        f"{sentence} ({number} times)"
        for sentence, number in found.items()
        if not any(words in sentence for words in excuses)
    ]


def errors_in(lines: Sequence[str]) -> Iterator[str]:
    """Lines that report an error, without what stands before them; of a traceback, the one that names the exception."""
    is_open = False
    for line in (_BEFORE.sub("", line) for line in lines):
        if is_open and _LAST_OF_TRACEBACK.match(line):
            is_open = False
            yield line
        elif _TRACEBACK.search(line):
            if is_open:
                yield UNENDED
            is_open = True
        elif _ERROR.search(line):
            yield line
    if is_open:
        yield UNENDED


def deaths_of_their_own(words: str, faults: Sequence[Fault]) -> list[str]:
    """Processes that the launcher had to start again more often than they were killed.

    Args: words: what the launcher has said.
    """
    killed = Counter(map(_child_of, killed_by(faults)))
    died = Counter(name.partition("-")[0] for name, _ in _DEATH.findall(words))
    crashed = Counter(name.partition("-")[0] for name, how in _DEATH.findall(words) if how != "signal SIGKILL")
    return [
        f"{name} died {number} times, {crashed[name]} of them by an exit code, and was killed {killed[name]} times"
        for name, number in died.items()
        if number > killed[name]
    ]


def workers_that_died(log: str, faults: Sequence[Fault]) -> list[str]:
    """The same of the workers of a fleet, by its log: one that is killed takes nobody along.

    Whoever kills the node kills its workers. A grader is replaced by its worker, if that has begun. A worker to
    which the buffer says that its disk is full ends with that.
    """
    died = re.findall(r"WARNING rollout_server\.fleet\.fleet: (\S+ died: .*)", log)
    if any(fault.whom == DISK for fault in faults):
        died = [sentence for sentence in died if "died: StorageError" not in sentence]
    killed = sum(whom in (ACTOR, NODE, GRADER) for whom in killed_by(faults))
    return [f"{len(died)} workers died and {killed} were killed: {died[:SHOWN]}"] if len(died) > killed else []


def records_with_gaps(run: RunDirectory, last_commit: int) -> list[str]:
    """What the run directory says of a run must be whole: one row per step, one per measurement, as far as it came."""
    sentences = []
    steps = [row["step"] for row in run.read_metrics()]
    if steps != list(range(1, len(steps) + 1)) or run.group_steps()[: len(steps)] != steps:
        sentences.append(f"metrics.jsonl or groups/ have gaps: {len(steps)} rows, {len(run.group_steps())} files")
    if len(steps) < last_commit:
        sentences.append(f"metrics.jsonl ends at step {len(steps)}, step {last_commit} was committed")
    rows = run.read_evaluations()
    measured = Counter((row["split"], row["version"]) for row in rows)
    sentences += [f"evaluation {key} has {number} rows" for key, number in measured.items() if number > 1]
    sentences += [
        f"evaluation {row['split']} of version {row['version']} lacks {row['num_dropped']} prompts"
        for row in rows
        if row["num_dropped"]
    ]
    return sentences


def records_of_other_groups(run: RunDirectory, batches: dict[int, Line]) -> list[str]:
    """The group records of a step must name the groups of its batch, in their order."""
    steps = [step for step in run.group_steps() if step in batches]
    return [
        f"groups/ of step {step} are not those of its batch"
        for step, results in run.read_groups(steps)
        if [result.group_id for result in results] != [result["id"] for result in batches[step]["results"]]
    ]


def _child_of(whom: str) -> str:
    return LEARNER if whom.startswith(LEARNER) else BELOW.get(whom, GRADER if whom == GRADER else whom)
