"""What producers and consumers saw of the buffer, in their own hand: one file of JSON lines per process.

A line is one write to a file opened for appending, so a process that is killed loses at most the line of what it has
just seen. What was seen twice stands there twice. The service under test writes nothing here.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bapo.core.codec import pack_batch, unpack_group
from bapo.core.types import Batch, Group, GroupResult, RolloutRequest

Line = dict[str, Any]


class Ledger:
    """The ledger of one process."""

    def __init__(self, folder: Path, who: str) -> None:
        self._who = who
        self._file = os.open(folder / f"{who}-{os.getpid()}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, event: str, **fields: Any) -> None:
        """Append one line."""
        line = {"at": time.monotonic(), "who": self._who, "event": event, **fields}
        os.write(self._file, json.dumps(line, separators=(",", ":")).encode() + b"\n")


def read_ledgers(folder: Path) -> list[Line]:
    """All whole lines of all processes, by time (the monotonic clock is one for the whole machine)."""
    lines = [line for path in folder.glob("*.jsonl") for line in _lines_of(path)]
    return sorted(lines, key=lambda line: line["at"])


def _lines_of(path: Path) -> Iterator[Line]:
    content = path.read_bytes()
    for line in content[: content.rfind(b"\n") + 1].splitlines():
        yield json.loads(line)


def group_line(frame: bytes | memoryview) -> Line:
    """A group that a producer sends: its content as a digest, and what the rules of the algorithm need."""
    group = unpack_group(frame)
    return {
        "id": group.group_id,
        "digest": digest_of_group(group),
        "prompt": group.prompt.prompt_id,
        "purpose": group.purpose.value,
        "version": group.policy_version,
        "rewards": group.rewards.tolist(),
    }


def batch_line(batch: Batch) -> Line:
    """A batch that the learner got: its whole content as a digest, its composition, and the results behind it."""
    return {
        "step": batch.step,
        "digest": digest(pack_batch(batch)),
        "trained": [
            [entry.group.group_id, entry.origin.value, digest_of_group(entry.group)] for entry in batch.entries
        ],
        "r_tot": batch.r_tot,
        **{name: batch.facts[name] for name in ("num_bad", "num_high")},
        "results": [result_line(result) for result in batch.results],
    }


def result_line(result: GroupResult) -> Line:
    """One group that the assembly looked at."""
    return {
        "id": result.group_id,
        "prompt": result.prompt_id,
        "purpose": result.purpose.value,
        "version": result.policy_version,
        "rewards": list(result.rewards),
        "origin": result.origin.value if result.origin else None,
        "reason": result.reason,
        "birth": result.birth,
    }


def request_line(requests: Sequence[RolloutRequest]) -> list[str]:
    """Ids of what was asked for."""
    return [request.request_id for request in requests]


def digest(data: bytes | memoryview) -> str:
    """Short, and enough to tell two contents apart."""
    return hashlib.sha256(data).hexdigest()[:24]


def digest_of_group(group: Group) -> str:
    """Of the columns that the learner trains on."""
    return digest(b"".join(part.tobytes() for part in (group.token_ids, group.rollout_logprobs, group.rewards)))
