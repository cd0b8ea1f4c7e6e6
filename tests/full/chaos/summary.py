"""`python -m tests.full.chaos.summary chaos-1.json ...`: the pieces of one or several trials as a table."""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.network import MOMENTARY

Piece = dict[str, Any]
SUMMED = {
    "steps": "learner steps",
    "batches_asked": "batches handed out",
    "acknowledged": "groups acknowledged",
    "sent": "groups sent",
    "resumes": "times the learner went back to a checkpoint",
    "restores": "snapshots restored",
}


def table(pieces: Sequence[Piece]) -> Iterator[str]:
    """Lines of Markdown."""
    recoveries: defaultdict[str, list[float]] = defaultdict(list)
    for piece in pieces:
        for kind, seconds in piece["recovery_s"].items():
            recoveries[_row(kind)] += seconds
    num_faults = sum(len(seconds) for seconds in recoveries.values())
    wrong = [sentence for piece in pieces for sentence in piece["violations"]]
    minutes = sum(piece["seconds"] for piece in pieces) / 60
    yield f"{num_faults} faults in {len(pieces)} pieces, {minutes:.1f} minutes: {len(wrong)} violations."
    yield from (f"VIOLATION {sentence}" for sentence in wrong)
    yield ", ".join(f"{sum(piece[key] for piece in pieces)} {words}" for key, words in SUMMED.items()) + "."
    yield f"Longest time without a finished step: {max(piece['longest_pause_s'] for piece in pieces):.1f} s."
    yield ""
    yield "| fault | times | next finished step after, median | longest |"
    yield "|---|---|---|---|"
    for row, found in sorted(recoveries.items(), key=lambda item: -len(item[1])):
        yield f"| {row} | {len(found)} | {statistics.median(found):.1f} s | {max(found):.1f} s |"


def _row(kind: str) -> str:
    """Kills one by one, other faults of processes and of links together."""
    what = kind.partition(" ")[0]
    if what in ("kill", "slow", "pause", "fill"):
        return kind
    return "stop any process" if what == "stop" else f"link {what} ({'a moment' if what in MOMENTARY else 'a while'})"


def main(paths: Sequence[str]) -> None:
    """Print it."""
    pieces = [piece for path in paths for piece in json.loads(Path(path).read_text())["pieces"]]
    sys.stdout.write("\n".join(table(pieces)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
