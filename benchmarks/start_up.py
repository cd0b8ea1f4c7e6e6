"""Seconds from `bapo train` to the first optimizer step, with a cold and with a warm page cache, and where they go.

    sudo python -m benchmarks.start_up --rounds 2 --out start_up.json

Cold: the kernel's page cache is dropped before the command, so that every library is read from the disk again
(needs root). Warm: the same command again. The work is that of benchmarks/peer_trl.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.anatomy import start_seconds
from benchmarks.training import train

CONFIG = "benchmarks/peer_trl/grpo.toml"
STEPS = 4
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def start(name: str, root: Path) -> dict[str, Any]:
    """One short run: seconds after the command until each process was ready and the first step was done."""
    return start_seconds(train(CONFIG, name, ["--run.num_steps", str(STEPS)], root=root).run)


def drop_page_cache() -> None:
    """Raises: PermissionError without root."""
    os.sync()
    DROP_CACHES.write_text("3")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--root", type=Path, default=Path("outputs/start-up"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rounds = []
    for index in range(args.rounds):
        drop_page_cache()
        cold = start(f"cold-{index}", args.root)
        rounds.append({"cold": cold, "warm": start(f"warm-{index}", args.root)})
    args.out.write_text(json.dumps(rounds, indent=1))
    print(json.dumps(rounds, indent=1))


if __name__ == "__main__":
    main()
