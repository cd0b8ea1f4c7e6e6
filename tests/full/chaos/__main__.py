"""`python -m tests.full.chaos --faults 550 --seed 7 --out chaos.json [--piece-s 240]`: the long trial, piece by piece.

The faults are drawn once from the seed. Each call goes on behind the last finished piece in the file, with a new run,
and ends after about `--piece-s` seconds; call it until it says that nothing is left. Three kinds of pieces take turns:
in the paper's order (max_steps_ahead = 0), where every batch must also be that of one plain loop; with Ray actors
as workers; with two ranks of the learner and two workers. As root, each run has its own disk, which some faults fill.

Exit codes: 0 no violation in this piece, 1 a violation or a standstill, 2 nothing is left to do.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.full.chaos.faults import plan
from tests.full.chaos.trial import PIECES, RAY, StandstillError, run_trial
from tests.support.small_disk import NoMountError, mounted

DONE = 2
DISK_MB = 1024
"""Holds all that a piece writes; the append-only file is rewritten from 256 MB on."""


def main() -> int:
    """One piece."""
    flags = _flags()
    begun = json.loads(flags.out.read_text()) if flags.out.exists() else {"pieces": []}
    if begun["pieces"] and (begun["faults"], begun["seed"]) != (flags.faults, flags.seed):
        print(f"{flags.out} is another trial: --faults {begun['faults']} --seed {begun['seed']}")
        return 1
    pieces: list[dict[str, Any]] = begun["pieces"]
    done = sum(sum(piece["faults"].values()) for piece in pieces)
    if done >= flags.faults:
        print(f"all {done} faults have been inflicted")
        return DONE
    overrides = {**PIECES[len(pieces) % len(PIECES)], **flags.extra}
    folder = Path(tempfile.mkdtemp(prefix="bapo-chaos-"))
    print(f"piece {len(pieces) + 1}: faults {done} ... of {flags.faults}, {overrides}, in {folder}", flush=True)
    with ExitStack() as stack:
        disk = _disk(stack, folder)
        ray = overrides.get("rollout.engine") == RAY["rollout.engine"]
        team = str(overrides.get("learner.num_ranks", 1)) != "1"
        left = plan(flags.faults, flags.seed, ray=ray, team=team, disk=disk is not None)[done:]
        try:
            trial = run_trial(folder, left, seed=flags.seed, overrides=overrides, limit_s=flags.piece_s, disk=disk)
        except StandstillError as error:
            print(f"STANDSTILL: {error}")
            _keep_logs(folder)
            return 1
        if trial.violations:
            _keep_logs(folder)
    piece = trial.line()
    pieces.append(piece)
    flags.out.write_text(json.dumps({"faults": flags.faults, "seed": flags.seed, "pieces": pieces}, indent=1) + "\n")
    print(_words(piece))
    return 1 if trial.violations else 0


def _disk(stack: ExitStack, folder: Path) -> Path | None:
    try:
        return stack.enter_context(mounted(folder / "disk", DISK_MB))
    except NoMountError as error:
        print(f"no fault fills the disk: {error}")
        return None


def _keep_logs(folder: Path) -> None:
    """Beside the ledgers: a disk of the run's own goes with it."""
    for logs in (folder / "disk").glob("*/logs"):
        shutil.copytree(logs, folder / "logs", dirs_exist_ok=True)
        print(f"its logs: {folder / 'logs'}")


def _words(piece: dict[str, Any]) -> str:
    lines = [
        f"{sum(piece['faults'].values())} faults in {piece['seconds']} s: {piece['steps']} steps, "
        f"{piece['batches_straight']} of {piece['batches_asked']} batches read straight from Redis, "
        f"{piece['acknowledged']} groups acknowledged, {piece['resumes']} resumes of the learner, "
        f"longest time without a step {piece['longest_pause_s']} s",
        *([f"{len(piece['missed'])} faults found nobody: {piece['missed']}"] if piece["missed"] else []),
        *(f"VIOLATION {sentence}" for sentence in piece["violations"]),
    ]
    return "\n".join(lines)


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.full.chaos", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--faults", type=int, default=550)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--piece-s", type=float, default=240.0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the run")
    flags = parser.parse_args()
    flags.extra = dict(token.split("=", 1) for token in flags.set)
    return flags


if __name__ == "__main__":
    sys.exit(main())
