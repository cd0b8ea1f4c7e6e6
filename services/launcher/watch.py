"""`bapo watch RUN`: the live view of a run that another process started."""

from __future__ import annotations

import time

from rich.console import Console

from bapo.config.tree import Config
from bapo.records import UNDER_WAY, RunDirectory
from services.launcher.crew import Interrupts
from services.launcher.display import make_display
from services.launcher.snapshot import Observer

TICK_S = 1.0


def watch(config: Config, run: RunDirectory, console: Console) -> int:
    """Show the run until it ends or the user has seen enough."""
    interrupts = Interrupts()
    interrupts.install()
    observer, display = Observer(config, run), make_display(console)
    try:
        while not interrupts.asked:
            addresses = run.read_run().get("addresses") or {}
            observer.watch(buffer_url=addresses.get("buffer_url"), fleet_url=addresses.get("fleet_url"))
            display.show(observer.look())
            if not run.is_under_way:
                break
            time.sleep(TICK_S)
    finally:
        display.close()
    if not interrupts.asked:
        display.say(_last_word(run))
    return 0


def _last_word(run: RunDirectory) -> str:
    fields = run.read_run()
    status = fields.get("status", "never started")
    if status in UNDER_WAY:
        status = f"no longer there (its launcher, process {fields.get('pid')}, is gone)"
    message = f": {fields['message']}" if fields.get("message") else ""
    return f"{run.name} is {status}{message}"
