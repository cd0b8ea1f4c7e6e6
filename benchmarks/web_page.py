"""How long the page of a large run takes: to open, to be brought up to date, and what that costs the service.

    python -m benchmarks.synthetic_run /tmp/large               # 1,000 steps, 10^5 fresh groups
    python -m benchmarks.web_page /tmp/large [--updates 50]

Appends steps to the run as the learner would, with the page open in a real Chromium, and measures from the page's
question to the painted answer ("page update"), and the seconds of CPU that the service spent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import psutil

from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.browser import chromium, visiting

TAKEN = "performance.getEntriesByName('page update').map(entry => entry.duration)"
SHOWS = "step => document.querySelector('#composition .summary')?.textContent.startsWith(`Step ${step}:`)"


def append_step(run: RunDirectory, rng: Random) -> int:
    """One more step, made of the newest one under the next number."""
    row = json.loads((run.path / "metrics.jsonl").read_bytes().splitlines()[-1])
    step = int(row["step"])
    ((_, results),) = run.read_groups([step])
    new = (result for result in results if result.birth == step)
    run.write_groups(step + 1, [replace(f, birth=step + 1, group_id=f"{f.group_id}-{step + 1}") for f in new])
    changed = {"step": step + 1, "loss": rng.gauss(0.0, 0.02), "reward_mean": rng.random(), "time": row["time"] + 4.0}
    run.append_metrics(row | changed)
    return step + 1


def percentile(values: list[float], share: float) -> float:
    """Nearest rank."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--updates", type=int, default=50)
    flags = parser.parse_args()
    run, rng = RunDirectory.open(flags.run), Random(1)
    num_steps = len(run.read_metrics())
    command = [sys.executable, "-m", "services.dashboard.view", str(run.path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, chromium() as browser:
        assert process.stdout is not None
        url = next(word for word in process.stdout.readline().split() if word.startswith("http://"))
        service = psutil.Process(process.pid)
        began_s, cpu_s = time.monotonic(), cpu(service)
        with visiting(browser, url) as visit:
            visit.page.wait_for_function(SHOWS, arg=num_steps)
            print(f"open: {time.monotonic() - began_s:.1f} s, {cpu(service) - cpu_s:.1f} s CPU of the service")
        began_s = time.monotonic()
        with visiting(browser, url) as visit:
            visit.page.wait_for_function(SHOWS, arg=num_steps)
            print(f"open again (records are read): {time.monotonic() - began_s:.1f} s")
            visit.page.evaluate("performance.clearMeasures()")
            cpu_s = cpu(service)
            for _ in range(flags.updates):
                visit.page.wait_for_function(SHOWS, arg=append_step(run, rng))
            taken = visit.page.evaluate(TAKEN)
            print(
                f"{len(taken)} updates: p50 {statistics.median(taken):.0f} ms, p95 {percentile(taken, 0.95):.0f} ms, "
                f"most {max(taken):.0f} ms; CPU of the service {1000 * (cpu(service) - cpu_s) / len(taken):.1f} ms each"
            )
        process.terminate()


def cpu(process: psutil.Process) -> float:
    """Seconds so far."""
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    main()
