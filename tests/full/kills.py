"""`python -m tests.full.kills deploy/configs/demo-lora.toml --each 20 --out kills.json [--KEY VALUE ...]`: kill -9 in a
real run, with the real engine.

Learner, rollout server, Redis, buffer service and launcher are killed in turn, each at a random moment; a launcher is
followed by `bapo train --resume`. After each kill a step that was never finished before must be finished. Steps that
are trained again, and versions that are published again, must have the same bits as the first time. At the end
metrics.jsonl has each step once, and `bapo buffer verify` finds every group.


With `--ledger` the agents of the run keep a ledger of their own, which must account for every trained response
(`tests/full/episode_ledger.py`). Further parts are `agents-0`, and `engine`, a worker's process.

Exit codes: 0 all of it held, 1 it did not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from bapo.runtime.run_directory.layout import RunDirectory
from tests.full import episode_ledger
from tests.support.launch import FREE_PORTS, REPOSITORY, family, kill_family, start

ENGINE = "engine"
LEARNER, WORKER, REDIS, SERVICE, LAUNCHER = "learner", "rollout_server", "redis", "buffer_service", "launcher"
PARTS = (LEARNER, WORKER, REDIS, SERVICE, LAUNCHER)
START_S, STEP_S = 240.0, 240.0
LONGEST_GAP_S = 6.0
SUPERVISION = ["--supervision.max_restarts", "1000", "--supervision.window_s", "1", "--checkpoint.every", "5"]


LEDGER = [
    "--agents.rollout", "tests.full.episode_ledger:rollout", "--diagnostics.token_records", "1",
    "--diagnostics.token_records_mb", "4096",
]  # fmt: skip


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


class KilledRun:
    """One run directory, and what was seen of it."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self.run = RunDirectory(folder / "run")
        self._output = folder / "output.log"
        place = ["--run.root", str(folder), "--run.name", "run", "--run.num_steps", "1000000"]
        self.process = self._start(["train", *arguments, *place, *SUPERVISION, *FREE_PORTS])
        self.bits: dict[str, set[str]] = {}
        """Name of a published file -> digests of what it was."""
        self.seconds: dict[str, list[float]] = {}
        """Who was killed -> seconds until the next step that was new."""
        threading.Thread(target=self._watch_versions, daemon=True).start()

    def _start(self, arguments: list[str]) -> subprocess.Popen[str]:
        process = start(arguments)
        threading.Thread(target=self._copy_output, args=(process,), daemon=True).start()
        return process

    def _copy_output(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with self._output.open("a") as file:
            for line in process.stdout:
                file.write(line)
                file.flush()

    def _watch_versions(self) -> None:
        known: dict[str, tuple[int, int]] = {}
        while True:
            for path in self.run.weights_path.glob("version-*.safetensors"):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    if known.get(path.name) != (status.st_ino, status.st_mtime_ns):
                        self.bits.setdefault(path.name, set()).add(hashlib.sha256(path.read_bytes()).hexdigest())
                        known[path.name] = (status.st_ino, status.st_mtime_ns)
            time.sleep(0.05)

    def last_step(self) -> int:
        """0 before the first."""
        rows = self.run.read_metrics() if self.run.path.exists() else []
        return max((int(row["step"]) for row in rows), default=0)

    def wait_for_step(self, step: int, timeout_s: float) -> None:
        """Raises: AssertionError with the last words of the run."""
        deadline = time.monotonic() + timeout_s
        while self.last_step() < step:
            words = "\n".join(self._output.read_text().splitlines()[-15:])
            assert self.process.poll() is None, f"the run ended with {self.process.returncode}:\n{words}"
            assert time.monotonic() < deadline, f"no step {step} within {timeout_s:.0f} s:\n{words}"
            time.sleep(0.1)

    def kill(self, whom: str) -> None:
        """SIGKILL, and what a user would do then."""
        if whom == LAUNCHER:
            members = family(self.process)
            self.process.kill()
            self.process.wait()
            psutil.wait_procs(members, timeout=60)
            self.process = self._start(["train", "--resume", str(self.run.path)])
            return
        if whom == ENGINE:
            found = [one for one in family(self.process) if _name(one).startswith("ray::WorkerActor")]
            if found:  # none while it starts again
                found[0].kill()
            return
        deadline = time.monotonic() + START_S
        while True:
            try:
                process = psutil.Process(self.run.read_run()["processes"][whom]["pid"])
                if whom == WORKER:  # the launcher knows its guard
                    process = process.children()[0]
                process.kill()
            except (psutil.NoSuchProcess, IndexError):  # killed before, and not back yet
                assert time.monotonic() < deadline, f"{whom} has not come back"
                time.sleep(0.2)
            else:
                return

    def end(self) -> int:
        """Ctrl-C; returns the launcher's exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)


def main() -> int:
    """All of it."""
    flags, arguments = _parser().parse_known_args()
    rng = random.Random(flags.seed)
    victims = flags.parts.split(",") * flags.each
    rng.shuffle(victims)
    folder = Path(tempfile.mkdtemp(prefix="bapo-kills-"))
    if flags.ledger:
        (folder / "ledger").mkdir()
        os.environ[episode_ledger.FOLDER] = str(folder / "ledger")
        arguments += LEDGER
    run = KilledRun(folder, [str(flags.config), *arguments])
    try:
        run.wait_for_step(2, START_S)
        for number in range(0, len(victims), flags.together):
            before, began = run.last_step(), time.monotonic()
            for whom in victims[number : number + flags.together]:
                time.sleep(rng.uniform(0.0, LONGEST_GAP_S))
                run.kill(whom)
            run.wait_for_step(before + 2, STEP_S)  # the step that was under way may be on the disk already
            names = ", ".join(victims[number : number + flags.together])
            run.seconds.setdefault(names, []).append(round(time.monotonic() - began, 1))
            print(
                f"{number + flags.together} of {len(victims)}: {names}, step {run.last_step()} after "
                f"{run.seconds[names][-1]} s",
                flush=True,
            )
        wrong, compared = violations(run), dict[str, int]()
        if flags.ledger:
            unaccounted, compared = episode_ledger.unaccounted(run.run.path, folder / "ledger")
            wrong += unaccounted
    finally:
        kill_family(run.process)
    found = {"seed": flags.seed, "arguments": arguments, "kills": len(victims), "steps": run.last_step(),
             "versions": len(run.bits), "seconds": run.seconds,
             "compared": compared, "violations": wrong}  # fmt: skip
    flags.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    if not wrong:
        shutil.rmtree(folder)
    return 1 if wrong else 0


def violations(run: KilledRun) -> list[str]:
    """What did not hold; ends the run."""
    verify = [sys.executable, "-m", "bapo.cli", "buffer", "verify", str(run.run.path)]
    checked = subprocess.run(verify, cwd=REPOSITORY, capture_output=True, text=True)
    wrong = [checked.stdout + checked.stderr] if checked.returncode else []
    if (code := run.end()) != 130:
        wrong.append(f"Ctrl-C ended it with {code}")
    steps = [row["step"] for row in run.run.read_metrics()]
    if steps != list(range(1, len(steps) + 1)):
        wrong.append(f"metrics.jsonl has gaps or repeats: {steps}")
    return wrong + [f"{name} was {len(found)} different files" for name, found in run.bits.items() if len(found) > 1]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.full.kills", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("config", type=Path)
    parser.add_argument("--each", type=int, default=20, help="kills of each part")
    parser.add_argument("--parts", default=",".join(PARTS), help="those that are killed; default: %(default)s")
    parser.add_argument("--together", type=int, default=1, help="kills before the run must go on; default: 1")
    parser.add_argument("--ledger", action="store_true", help="agents keep a ledger of their episodes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    return parser


if __name__ == "__main__":
    sys.exit(main())
