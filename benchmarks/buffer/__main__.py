"""The buffer's throughput, CPU and memory (docs/buffer.md), as JSON.

    python -m benchmarks.buffer --reverb-python RV/bin/python --out buffer.json
    python -m benchmarks.buffer --only 1 3 --rounds 3 --sizes 100K --out quick.json

Items: 1 pull, 2 push, 3 fraction of raw Redis, 4 CPU (1 to 4 are one measurement), 6 paced load (and --soak-s and
--full-s for the long ones). Reverb needs a virtual environment of its own (requirements.txt in this folder); without it
the ratios to it are left out.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.buffer import movement, soak

ITEMS = (1, 2, 3, 4, 6)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="*", choices=ITEMS, default=list(ITEMS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", choices=("20K", "100K", "500K"), default=["20K", "100K", "500K"])
    parser.add_argument("--reverb-python", type=Path, help="interpreter of the environment that has Reverb")
    parser.add_argument("--soak-s", type=float, default=0.0, help="item 6 at the highest rate for so long")
    parser.add_argument("--full-s", type=float, default=0.0, help="item 6 with a buffer that is full for so long")
    parser.add_argument("--profile", action="store_true", help="py-spy stacks of the service, items 1 to 4")
    parser.add_argument("--folder", type=Path, help="where processes write; a temporary folder if not given")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    args = parsed()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="buffer-bench-"))
    result: dict[str, Any] = {"machine": machine(), "rounds": args.rounds, "started": time.strftime("%F %T")}

    def add(name: str, part: Callable[[], Any]) -> None:
        """Write after each part: a long run that is cut off keeps what it has."""
        result[name] = part()
        args.out.write_text(json.dumps(result, indent=1))

    if set(args.only) & {1, 2, 3, 4}:
        add("movement", lambda: movement.measure(
            folder / "movement", args.rounds, args.reverb_python, args.sizes, args.profile))  # fmt: skip
    if 6 in args.only:
        add("paced", lambda: soak.paced(folder, aof=True))
        add("paced, no AOF", lambda: soak.paced(folder, aof=False))
    if 6 in args.only and args.soak_s:
        add("soak", lambda: soak.flat_out(folder, args.soak_s))
    if 6 in args.only and args.full_s:
        add("full", lambda: soak.full(folder, args.full_s))
    print(json.dumps(result, indent=1))


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    return {
        "cpu": model.partition(": ")[2],
        "cores": len(__import__("os").sched_getaffinity(0)),
        "os": platform.platform(),
    }


if __name__ == "__main__":
    main()
