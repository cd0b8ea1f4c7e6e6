"""`python -m tests.full.mutation [--seed N] [--sample N] [--budget-s S] [--out FILE]`: the mutation gate of the store.

Examples:
    python -m tests.full.mutation --sample 180 --seed 7 --out mutation.json
    python -m tests.full.mutation --sample 180 --seed 7 --out mutation.json --budget-s 280   # goes on where it stopped

Exits with 1 when less than 95 % of the mutants that are not equivalent were killed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.full.mutation.gate import (
    LIMIT_S,
    Verdict,
    Workplace,
    all_mutants,
    digest_of,
    equivalents,
    load,
    sampled,
    save,
)

WANTED = 0.95


def main() -> int:
    """Try the sample out, as far as the budget goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--sample", type=int, default=180, help="mutants drawn from all of them (default: %(default)s)")
    parser.add_argument("--only", default="", help="only those whose path holds this text")
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"), help="stop after so many seconds, to go on later"
    )
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of one mutant's tests (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("mutation.json"))
    parser.add_argument("--again", action="store_true", help="try those that survived once more")
    flags = parser.parse_args()
    deadline = time.monotonic() + flags.budget_s
    everything = all_mutants()
    chosen = [mutant for mutant in sampled(everything, flags.sample, flags.seed) if flags.only in mutant.path]
    known, excused = load(flags.out), equivalents()
    verdicts: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="bapo-mutation-") as folder, ExitStack() as ends:
        workplace = Workplace(Path(folder) / "copy")
        ends.callback(workplace.close)
        if any(digest_of(mutant) not in known for mutant in chosen):
            status, by = workplace.run("assembly.py", flags.limit_s * 2)
            if status != "survived":
                sys.stderr.write(f"the tests fail without any mutant: {by}\n")
                return 2
        for mutant in chosen:
            digest = digest_of(mutant)
            line = known.get(digest)
            if mutant.key in excused:
                line = Verdict(mutant=mutant, status="equivalent", by=excused[mutant.key], seconds=0.0).line()
            elif line is None or line["status"] == "equivalent" or (flags.again and line["status"] == "survived"):
                if time.monotonic() > deadline:
                    continue
                line = workplace.try_out(mutant, limit_s=flags.limit_s).line()
                sys.stdout.write(f"{line['status']:9} {line['seconds']:5.1f} s  {mutant.path} {mutant.changes}\n")
                sys.stdout.flush()
            verdicts[digest] = line
            save(flags.out, flags.seed, verdicts, len(chosen))
    summary = save(flags.out, flags.seed, verdicts, len(chosen))
    for line in verdicts.values():
        if line["status"] == "survived":
            sys.stdout.write(f"\nSURVIVED {line['operator']}\n{line['diff']}\n")
    sys.stdout.write(json.dumps(summary | {"all": len(everything)}) + "\n")
    share = summary["killed_share"]
    return 0 if share is not None and share >= WANTED and summary["tried"] == summary["sampled"] else 1


if __name__ == "__main__":
    sys.exit(main())
