"""Every `python` line of the docs: its own parser takes it, and it runs here, in a test, or says why in none."""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.docs_pages import PAGES, REPOSITORY, commands, program

RUNS_HERE = {"deploy.monitoring"}
"""Takes a second, without effects."""

ELSEWHERE = {
    "benchmarks.autoscaling": "tests/unit/test_autoscaling_simulation.py",
    "benchmarks.autoscaling.large_run": "tests/unit/test_autoscaling_simulation.py",
    "benchmarks.buffer": "tests/unit/test_buffer_benchmark.py",
    "benchmarks.multi_host": "tests/chaos/test_hosts.py",
    "tests.chaos": "tests/chaos/test_chaos.py",
    "tests.mutation": "tests/integration/test_mutation_gate.py",
}
"""Module that takes minutes -> the test of its parts."""

EXCUSED = {
    "benchmarks.anatomy": "needs a run that goes on",
    "benchmarks.autoscaling.real_run": "minutes; tests/integration/test_autoscaling.py checks the same",
    "benchmarks.diagnostics_cost": "a measurement of minutes on a machine that does nothing else",
    "benchmarks.learner_memory": "a measurement of minutes on a machine that does nothing else",
    "benchmarks.overlap": "a measurement of minutes on a machine that does nothing else",
    "benchmarks.peer_trl": "needs an environment with TRL",
    "benchmarks.services_cost": "a measurement of minutes on a machine that does nothing else",
    "benchmarks.start_up": "drops the kernel's caches, as root",
    "pip": "installs from a registry",
    "pytest": "runs tests",
    "venv": "makes an environment",
    "examples/other_framework.py": "runs in tests/integration/test_other_framework.py",
}

LINES = sorted({(page.name, line) for page in PAGES for line in commands(page) if program(line) == "python"})
NO_PARSER = {"benchmarks.autoscaling.large_run", "pip", "pytest", "venv"}
PARSED = [(page, line) for page, line in LINES if " -m " in line and line.split()[2] not in NO_PARSER]


class ParsedError(Exception):
    """The module's parser has taken the line, and nothing was done."""


def subject(line: str) -> str:
    """The module or script that a line runs."""
    words = line.split()
    return words[2] if words[1] == "-m" else words[1]


def test_there_are_such_lines() -> None:
    assert len(LINES) > 20
    assert len(PARSED) > 12


@pytest.mark.parametrize(("page", "line"), LINES)
def test_a_line_of_python_runs_somewhere_or_says_why_not(page: str, line: str) -> None:
    assert subject(line) in RUNS_HERE | ELSEWHERE.keys() | EXCUSED.keys()
    for word in shlex.split(line)[1:]:
        if re.match(r"(tests|requirements|benchmarks|examples)/", word):
            assert (REPOSITORY / word).exists(), word


@pytest.mark.parametrize(("module", "where"), sorted(ELSEWHERE.items()))
def test_the_test_of_a_module_imports_it(module: str, where: str) -> None:
    package = module.removesuffix(".large_run")
    assert re.search(rf"^from {re.escape(package)}\b", (REPOSITORY / where).read_text(), re.M)


@pytest.mark.parametrize(("page", "line"), PARSED)
def test_a_modules_own_parser_takes_the_line(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, *arguments: Any) -> None:
        parse_args(parser, *arguments)
        raise ParsedError

    words = shlex.split(line)[3:]
    words = words[: words.index(">")] if ">" in words else words
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [subject(line), *words])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # other tests have imported parts of it
        with pytest.raises(ParsedError):
            runpy.run_module(subject(line), run_name="__main__")


@pytest.mark.parametrize(("page", "line"), [(page, line) for page, line in LINES if subject(line) in RUNS_HERE])
def test_what_takes_a_second_runs(page: str, line: str, tmp_path: Path) -> None:
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}
    subprocess.run(["bash", "-ec", line], cwd=tmp_path, env=os.environ | paths, check=True)
    written = line.partition("> ")[2]
    jobs = yaml.safe_load((tmp_path / written).read_text())["scrape_configs"]
    named = str(jobs)
    assert all(f"{tmp_path}/{run}/prometheus.json" in named for run in ("outputs/mine", "outputs/other"))
