"""Runs the fast tests of the store against each mutant, in a copy of the repository, and says which ones survive.

A mutant is killed when a test fails, or when the tests do not end in time. What survives is shown with its diff; a
mutant that no test can kill, because it changes nothing that matters, is listed in equivalent.toml with the reason.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.full.mutation.lua_mutants import lua_mutants
from tests.full.mutation.mutant import Mutant
from tests.full.mutation.python_mutants import python_mutants

REPOSITORY = Path(__file__).resolve().parents[3]
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
STORES = (
    "store/redis/store.py",
    "store/redis/snapshot.py",
    "assembly.py",
)
LUA = sorted(path.name for path in (REPOSITORY / "buffer_service/store/redis/lua").glob("*.lua"))
TESTS = (
    "tests/contract/test_store_by_hand.py",
    "tests/contract/test_store_claims.py",
    "tests/contract/test_store_groups.py",
    "tests/contract/test_store_assembly.py",
    "tests/contract/test_store_image.py",
    "tests/contract/test_store_limits.py",
    "tests/contract/test_store_model.py",
    "tests/contract/test_store_requests.py",
)
MORE_TESTS = {
    "assembly.py": (
        "tests/contract/test_buffer_assembly.py",
        "tests/contract/test_assembly_decisions.py",
        "tests/contract/test_assembly_races.py",
        "tests/contract/test_assembly_rounds.py",
        "tests/contract/test_assembly_records.py",
    )
}
COPIED = ("bapo", "buffer_service", "learner", "rollout_server", "tests", "pyproject.toml")
LIMIT_S = 90.0
KILLED = ("killed", "timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one mutant."""

    mutant: Mutant
    status: str
    """killed | timeout | survived | equivalent"""
    by: str
    """The first test that failed, or why it is equivalent."""
    seconds: float

    def line(self) -> dict[str, Any]:
        """For the JSON file."""
        mutant = self.mutant
        return {
            "path": mutant.path,
            "operator": mutant.operator,
            "status": self.status,
            "by": self.by,
            "seconds": round(self.seconds, 1),
            "diff": mutant.diff,
        }


PATHS = tuple(
    [f"buffer_service/{name}" for name in STORES] + [f"buffer_service/store/redis/lua/{name}" for name in LUA]
)


@cache
def mutants_of(path: str) -> list[Mutant]:
    """Of one file of the store."""
    make = lua_mutants if path.endswith(".lua") else python_mutants
    return make(path, (REPOSITORY / path).read_text())


def all_mutants() -> list[Mutant]:
    """Of every file of the store."""
    return [mutant for path in PATHS for mutant in mutants_of(path)]


def sampled(mutants: Sequence[Mutant], number: int, seed: int) -> list[Mutant]:
    """So many of them, drawn by the seed: the same ones when other lines change."""
    order = sorted(mutants, key=lambda mutant: hashlib.sha256(f"{seed} {digest_of(mutant)}".encode()).digest())
    return order[:number]


def equivalents() -> dict[str, str]:
    """Key of a mutant -> why no test can kill it."""
    entries = tomllib.loads(EQUIVALENT.read_text()).get("mutant", [])
    return {entry["key"].strip(): entry["reason"] for entry in entries}


class Workplace:
    """A copy of the repository in which one file at a time has a bug."""

    def __init__(self, folder: Path, tests: Sequence[str] = TESTS) -> None:
        self.folder, self.tests = folder, tests
        for name in COPIED:
            source = REPOSITORY / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / name)
        self._warm = self._start()

    def try_out(self, mutant: Mutant, *, limit_s: float = LIMIT_S) -> Verdict:
        """Put the bug in, run the tests until one fails, take it out again."""
        path = self.folder / mutant.path
        original = path.read_text()
        began = time.monotonic()
        path.write_text(mutant.after)
        try:
            status, by = self.run(Path(mutant.path).name, limit_s)
        finally:
            path.write_text(original)
        return Verdict(mutant=mutant, status=status, by=by, seconds=time.monotonic() - began)

    def run(self, name: str, limit_s: float) -> tuple[str, str]:
        """(survived | killed | timeout, the test that failed)."""
        output = self.folder / "output.txt"
        tests = (*MORE_TESTS.get(name, ()), *self.tests)
        options = ["-q", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
        group = self._ask(json.dumps([[*options, *tests], str(output)]))
        if not select.select([self._warm.stdout], [], [], limit_s)[0]:
            os.killpg(group, signal.SIGKILL)  # with the Redis that it has started
            self._answer()
            return "timeout", f"no end within {limit_s:.0f} s"
        if self._answer() == 0:
            return "survived", ""
        lines = output.read_text(errors="replace").splitlines()
        return "killed", next((line[:200] for line in lines if line.startswith(("FAILED", "ERROR"))), "")

    def close(self) -> None:
        """End the process that runs tests."""
        self._warm.terminate()
        self._warm.communicate()

    def _start(self) -> subprocess.Popen[str]:
        # Shrinking a failure takes longer than finding it, and nobody reads it here.
        env = os.environ | {
            "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1", "BAPO_MODEL_SHRINK": "0",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, "tests/full/mutation/warm.py"]
        return subprocess.Popen(
            command, cwd=self.folder, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def _ask(self, line: str) -> int:
        assert self._warm.stdin is not None
        self._warm.stdin.write(line + "\n")
        self._warm.stdin.flush()
        return self._answer()

    def _answer(self) -> int:
        assert self._warm.stdout is not None
        return int(self._warm.stdout.readline())


def digest_of(mutant: Mutant) -> str:
    """Names a mutant in the JSON file. Where it survived it may be tried again; killed is killed, tests only grow."""
    return hashlib.sha256(mutant.key.encode()).hexdigest()[:16]


def load(path: Path) -> dict[str, dict[str, Any]]:
    """Earlier verdicts by digest."""
    return json.loads(path.read_text())["mutants"] if path.exists() else {}


def save(path: Path, seed: int, verdicts: dict[str, dict[str, Any]], total: int) -> dict[str, Any]:
    """Write the JSON file; returns its summary."""
    counts: dict[str, int] = {}
    for line in verdicts.values():
        counts[line["status"]] = counts.get(line["status"], 0) + 1
    killed, survived = sum(counts.get(word, 0) for word in KILLED), counts.get("survived", 0)
    summary = {
        "seed": seed,
        "sampled": total,
        "tried": len(verdicts),
        **counts,
        "killed_share": round(killed / (killed + survived), 4) if killed + survived else None,
    }
    path.write_text(json.dumps({"summary": summary, "mutants": verdicts}, indent=1))
    return summary
