"""Where the time and the memory of a finished run went, from its run directory.

    python -m benchmarks.anatomy outputs/demo-001

Weight updates: seconds from the learner's call until every engine has sampled the canary with the new weights, and
their share of the learner's wall time. Start: seconds until each process was ready and until the first step ended.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from bapo.runtime.run_directory.layout import RunDirectory
from benchmarks.training import median

PHASES = ("wait_batch", "prox", "update", "sync")


def weight_updates(metrics: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds per update and share of the time between the first and the last record."""
    syncs = [row["sync_s"] for row in metrics[1:] if row["sync_s"] > 0]
    wall_s = metrics[-1]["time"] - metrics[0]["time"]
    return {
        "updates": len(syncs),
        "seconds_median": median(syncs),
        "seconds_max": round(max(syncs), 4),
        "share_of_wall": round(sum(syncs) / wall_s, 4),
    }


def phases(metrics: list[dict[str, Any]]) -> dict[str, float]:
    """Mean seconds of each phase of a step, without the first, which waits for the engines."""
    rest = metrics[1:]
    return {name: round(sum(row[f"{name}_s"] for row in rest) / len(rest), 4) for name in (*PHASES, "step")}


def start_seconds(run: RunDirectory) -> dict[str, float]:
    """Seconds after the command until each process was ready, and until the first optimizer steps were done."""
    fields = run.read_run()
    ready = {name: entry["ready_after_s"] for name, entry in fields["processes"].items()}
    return ready | {"first_optimizer_steps_done": round(run.read_metrics()[0]["time"] - fields["started_at"], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    run = RunDirectory.open(parser.parse_args().run)
    metrics, processes = run.read_metrics(), run.read_run()["processes"]
    result = {
        "run": run.name,
        "start_s": start_seconds(run),
        "peak_mib": {name: entry["peak_mib"] for name, entry in processes.items()},
        "weight_updates": weight_updates(metrics),
        "step_s": phases(metrics),
        "tokens_per_s": round(sum(r["num_tokens"] for r in metrics[1:]) / (metrics[-1]["time"] - metrics[0]["time"])),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
