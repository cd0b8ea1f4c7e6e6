"""`python -m services.launcher {train,up,buffer,evaluate,watch,check,doctor,dry-run} ...`: run by the `bapo` command.

Exit codes: 0 finished; 130 stopped by the user; otherwise that of the process that failed, or of the error.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from bapo.config.load import load_resolved
from bapo.config.tree import Config
from bapo.core.errors import BapoError, ConfigError
from bapo.runtime.process import Interrupts, end_now, interruptible
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.standard_streams import print_any_text
from services.launcher import scenarios
from services.launcher.display.console import Display, LineDisplay, QuietDisplay, VerboseDisplay, make_display, watch
from services.launcher.display.summary import evaluation_summary, losses_of, summary
from services.launcher.doctor import checks
from services.launcher.doctor.check_list import check_data, preflight
from services.launcher.doctor.doctor import run_doctor
from services.launcher.doctor.dry_run import dry_run
from services.launcher.doctor.inputs import FILE as INPUTS
from services.launcher.doctor.inputs import check_inputs, listen_on_free_ports
from services.launcher.doctor.situation import Situation
from services.launcher.gpus.devices import visible_here
from services.launcher.gpus.plan import GpuPlan, share_gpus
from services.launcher.session import Session, lock, remember
from services.launcher.supervision.children import InterruptedRunError
from services.launcher.supervision.supervisor import ChildFailedError, explain

INTERRUPTED = 130
Scenario = Callable[[Session], None]


def main() -> int:
    print_any_text()
    flags = _parser().parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    console = Console(highlight=False)
    try:
        if flags.verb == "doctor":
            config = load_resolved(flags.config)
            return run_doctor(config, console, as_json=flags.json, is_quiet=flags.quiet, part=flags.part)
        if flags.verb == "dry-run":
            return dry_run(load_resolved(flags.config), flags.plan, console)
        run = RunDirectory.open(flags.run_dir)
        if flags.verb == "watch":
            return watch(load_resolved(run.config_path), run, console)
        with lock(run):
            return _check(flags, run) if flags.verb == "check" else _launch(flags, run, console)
    except BapoError as error:
        Console(stderr=True, highlight=False).print(Text(f"error: {error}", "red"), soft_wrap=True)
        return error.exit_code
    except KeyboardInterrupt:
        _to_stderr("stopped by the user before the start")
        end_now(INTERRUPTED)  # the threads of a download end with it; what is there of a file is used the next time


def _check(flags: argparse.Namespace, run: RunDirectory) -> int:
    """Of a run whose processes are containers, those checks of `_preflight` that are not about a machine.

    Raises: BapoError.
    """
    is_resumed = (run.path / INPUTS).is_file() or bool(run.read_metrics())
    situation = Situation(config=load_resolved(run.config_path), is_resumed=is_resumed)
    with interruptible():
        check_data(situation, say=_to_stderr)
        accept = "BAPO_ACCEPT_CHANGES=1 docker compose up -d"
        if note := check_inputs(situation, run, accepts=flags.accept_changes, how_to_accept=accept):
            _to_stderr(note)
    return 0


def _launch(flags: argparse.Namespace, run: RunDirectory, console: Console) -> int:
    """Run a scenario, and report how it ended."""
    config = load_resolved(run.config_path)
    if flags.verb == "train" and flags.free_ports:
        config = listen_on_free_ports(run, config)
    gpus = _preflight(config, flags, run)
    interrupts = Interrupts()
    interrupts.install()
    was_finished = run.read_run().get("status") == "finished"
    display = _display(flags, run, console)
    try:
        with Session(config, run, display, interrupts, gpus, adds_records=flags.verb != "buffer") as session:
            _scenario(flags)(session)
    except InterruptedRunError:
        message = "stopped by the user" + _how_to_resume(flags, run, INTERRUPTED)
        # Serving the buffer of a finished run does not change the status of the run.
        status = "finished" if was_finished and flags.verb == "buffer" else "interrupted"
        return _end(run, console, INTERRUPTED, status, message)
    except ChildFailedError as error:
        code = error.child.exit_code or 1
        return _end(run, console, code, "failed", explain(error.child, config) + _how_to_resume(flags, run, code))
    except BapoError as error:
        message = f"error: {error}" + _how_to_resume(flags, run, error.exit_code)
        return _end(run, console, error.exit_code, "failed", message)
    remember(run, status="finished", exit_code=0, message="")
    if flags.verb == "train":
        _write_report(run, console)
        console.print(summary(run, config))
    else:
        console.print(evaluation_summary(run))
    return 0


def _display(flags: argparse.Namespace, run: RunDirectory, console: Console) -> Display:
    if flags.quiet:
        return QuietDisplay()
    if flags.verbose:
        return VerboseDisplay(console, run)
    return LineDisplay(console) if flags.verb == "buffer" else make_display(console)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def _preflight(config: Config, flags: argparse.Namespace, run: RunDirectory) -> GpuPlan:
    """Run preflight checks; a run that never started is deleted, so that its name can be reused."""
    try:
        with interruptible():
            return _checked(config, flags, run)
    except (BapoError, KeyboardInterrupt):
        if run.is_new:
            shutil.rmtree(run.path)
        raise


def _checked(config: Config, flags: argparse.Namespace, run: RunDirectory) -> GpuPlan:
    """The checks. Raises: BapoError."""
    if flags.verb == "buffer":
        checks.preflight_buffer(config)
        return GpuPlan()
    # With `up` the learner is started manually, and gets its GPUs, too.
    with_learner, is_cluster = flags.verb != "evaluate", "RAY_ADDRESS" in os.environ
    # First, because the rest may download a model of many gigabytes.
    plan = share_gpus(config, visible_here(), with_learner=with_learner, is_cluster=is_cluster)
    situation = Situation(
        config=config,
        with_learner=flags.verb == "train",
        has_learner=with_learner,
        is_resumed=bool(run.read_run()),
    )
    say: Callable[[str], None] = (lambda _: None) if flags.quiet else _to_stderr
    preflight(situation, say=say)
    if flags.verb == "train":
        accept = f"bapo train --resume {run.path} --accept-changes"
        if note := check_inputs(situation, run, accepts=flags.accept_changes, how_to_accept=accept):
            say(note)
    return plan


def _scenario(flags: argparse.Namespace) -> Scenario:
    if flags.verb == "up":
        return scenarios.serve
    if flags.verb == "buffer":
        return scenarios.serve_buffer
    if flags.verb == "evaluate":
        return scenarios.evaluate
    return lambda session: scenarios.train(session, resume=flags.resume)


def _end(run: RunDirectory, console: Console, code: int, status: str, message: str) -> int:
    """Report a run that did not finish: losses so far, the reason, and how to resume it."""
    remember(run, status=status, exit_code=code, message=message)
    for what, lost in losses_of(run):
        console.print(Text(f"{what}: {lost}"), soft_wrap=True)
    console.print(Text(message, "yellow" if code == INTERRUPTED else "red"), soft_wrap=True)
    return code


def _how_to_resume(flags: argparse.Namespace, run: RunDirectory, code: int) -> str:
    if flags.verb == "buffer" and code == INTERRUPTED:
        return f"; restart it with its data: bapo up buffer --run {run.path}"
    # A run keeps its config, so an invalid one cannot be resumed.
    if flags.verb != "train" or code == ConfigError.exit_code:
        return ""
    return f"\n{run.how_to_resume}"


def _write_report(run: RunDirectory, console: Console) -> None:
    """Write the report in a separate process, so that a failure does not fail the run."""
    command = [sys.executable, "-m", "services.dashboard.view", str(run.path), "--export", str(run.report_path)]
    made = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if made.returncode != 0:
        reason = made.stderr.strip().splitlines()[-1:] or ["no reason given"]
        console.print(Text(f"could not write the report: {reason[0]}; try bapo report {run.path}", "yellow"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m services.launcher")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("train", "up", "buffer", "evaluate", "watch", "check"):
        verbs.add_parser(verb).add_argument("--run-dir", required=True)
        verbs.choices[verb].add_argument("--quiet", action="store_true")
        verbs.choices[verb].add_argument("--verbose", action="store_true")
    verbs.choices["train"].add_argument("--resume", action="store_true")
    for verb in ("train", "check"):
        verbs.choices[verb].add_argument("--accept-changes", action="store_true")
    verbs.choices["train"].add_argument("--free-ports", action="store_true")
    doctor = verbs.add_parser("doctor")
    doctor.add_argument("--config", required=True)
    doctor.add_argument("--json", action="store_true")
    doctor.add_argument("--quiet", action="store_true")
    doctor.add_argument("--part", choices=["all", "learner", "workers"], default="all")
    planned = verbs.add_parser("dry-run")
    planned.add_argument("--config", required=True)
    planned.add_argument("--for", dest="plan", choices=("train", "up"), default="train")
    return parser


if __name__ == "__main__":
    sys.exit(main())
