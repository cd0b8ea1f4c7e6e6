"""A run in a browser: made-up steps, `bapo view` as a process, and what the drawings hold."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bapo.runtime.run_directory.layout import RunDirectory
from benchmarks.synthetic_run import SyntheticRun, create, extend
from tests.support.browser import Visit

NUM_STEPS, BATCH, GROUP, PROMPTS = 24, 6, 4, 30


def made_run(path: Path, num_steps: int = NUM_STEPS) -> tuple[RunDirectory, SyntheticRun]:
    run, config = create(path, num_steps=100, batch_size=BATCH, group_size=GROUP)
    made = SyntheticRun(config, num_prompts=PROMPTS)
    for measured in made.evaluations():
        run.append_evaluation(measured)
    extend(run, made, num_steps, measure_every=8)
    run.update_run(status="running", started_at=1000.0)
    return run, made


@contextmanager
def viewed(run: RunDirectory, port: int = 0) -> Iterator[str]:
    """`bapo view` as a process; its address."""
    command = [sys.executable, "-m", "services.dashboard.view", str(run.path), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        try:
            yield re.search(r"http://\S+", said)[0]  # type: ignore[index]
        finally:
            process.send_signal(signal.SIGTERM)


def opened(visit: Visit, step: int) -> Visit:
    """When the page shows this step."""
    visit.page.wait_for_function(
        "step => document.querySelector('#composition .summary')?.textContent.startsWith(`Step ${step}:`)", arg=step
    )
    return visit


def drawn(visit: Visit, chart: str) -> dict[str, list[Any]]:
    """Name of a series -> its data, as ECharts has them."""
    series = visit.page.evaluate(
        "id => document.querySelector(`#${id} .canvas`).card.chart().getOption().series.map(s => [s.name, s.data])",
        chart,
    )
    return dict(series)


def values(visit: Visit, chart: str, name: str) -> list[Any]:
    return all_values(visit, chart)[name]


def all_values(visit: Visit, chart: str) -> dict[str, list[Any]]:
    """Every series that a chart has, at one moment."""
    return {
        name: [point[1] if isinstance(point, list) else point for point in points]
        for name, points in drawn(visit, chart).items()
    }


def rows_of(run: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
