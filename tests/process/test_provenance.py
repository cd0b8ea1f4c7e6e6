"""Which commit made a run: from the environment, from git, or not known."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from bapo.config.load import load_config
from bapo.runtime import build_info
from bapo.runtime.build_info import checked_out, commit
from bapo.runtime.metrics.metric import Process
from bapo.runtime.metrics.server import Telemetry
from services.launcher.processes import base_environment
from services.launcher.session import provenance_of
from studies.compare.gather import gather, remarks
from tests.support.synthetic_runs import evaluation_row, write_run

HASH = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40


def git(folder: Path, *arguments: str) -> str:
    settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", "-C", str(folder), *settings, *arguments], check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    if shutil.which("git") is None:
        pytest.skip("needs git")
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / "code.py").write_text("one")
    git(folder, "add", "code.py")
    git(folder, "commit", "--quiet", "-m", "first")
    git(folder, "tag", "v1")  # names of releases are not what is wanted
    return folder


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BAPO_COMMIT", raising=False)
    checked_out.cache_clear()


def test_a_checkout_says_its_commit(checkout: Path) -> None:
    assert checked_out(checkout) == git(checkout, "rev-parse", "HEAD").strip()


def test_changed_files_make_it_dirty_and_new_ones_do_not(checkout: Path) -> None:
    (checkout / "outputs.txt").write_text("new")
    assert checked_out(checkout) == git(checkout, "rev-parse", "HEAD").strip()
    checked_out.cache_clear()
    (checkout / "code.py").write_text("two")
    assert checked_out(checkout) == git(checkout, "rev-parse", "HEAD").strip() + "-dirty"


def test_a_package_installed_inside_anothers_checkout_has_none(checkout: Path) -> None:
    inside = checkout / "venv" / "site-packages"
    inside.mkdir(parents=True)
    assert checked_out(inside) is None


@pytest.mark.parametrize(
    ("given", "want"), [("abc", "abc"), (f"{HASH}-dirty", f"{HASH}-dirty"), ("unknown", OTHER), ("", OTHER)]
)
def test_the_environment_wins_unless_it_does_not_know(monkeypatch: pytest.MonkeyPatch, given: str, want: str) -> None:
    monkeypatch.setattr(build_info, "checked_out", lambda folder: OTHER)
    monkeypatch.setenv("BAPO_COMMIT", given)
    assert commit() == want


def test_every_process_of_a_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_info, "checked_out", lambda folder: HASH)
    assert base_environment(load_config(["bapo"], []))["BAPO_COMMIT"] == HASH
    monkeypatch.setattr(build_info, "checked_out", lambda folder: None)
    assert "BAPO_COMMIT" not in base_environment(load_config(["bapo"], []))


def test_metrics_say_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAPO_COMMIT", HASH)
    assert f'commit="{HASH}"' in Telemetry(Process.SCHEDULER).exposition().decode()
    monkeypatch.setenv("BAPO_COMMIT", "unknown")
    monkeypatch.setattr(build_info, "checked_out", lambda folder: None)
    assert 'commit="unknown"' in Telemetry(Process.SCHEDULER).exposition().decode()


def test_a_run_that_goes_on_with_other_code_remembers_the_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAPO_COMMIT", HASH)
    first = provenance_of({})
    assert first == {"commit": HASH, "earlier_commits": []}
    assert provenance_of(first) == first
    monkeypatch.setenv("BAPO_COMMIT", OTHER)
    assert provenance_of(first) == {"commit": OTHER, "earlier_commits": [HASH]}
    # Of a start before this was written down nothing is known, and that is remembered.
    assert provenance_of({"started_at": 1.0}) == {"commit": OTHER, "earlier_commits": [None]}


def test_a_remark_names_a_run_that_was_last_evaluated_before_its_end(tmp_path: Path) -> None:
    rows = [evaluation_row("cd4", version, {"p": "00", "q": "01"}) for version in (1, 2)]
    write_run(tmp_path / "a-s1", seed=1, evaluations=rows)
    assert remarks(gather([tmp_path / "a-s1"])) == ["a-s1 was last evaluated after step 1 of 2"]


def test_a_remark_names_runs_that_are_no_seeds_of_one_method(tmp_path: Path) -> None:
    write_run(tmp_path / "a-s1", seed=1)
    write_run(tmp_path / "a-s2", seed=2, overrides=["--learner.lr", "0.5", "--learner.port", "1"])
    (remark,) = remarks(gather([tmp_path / "a-s1", tmp_path / "a-s2"]))
    assert remark == "a-s2 is not another seed of a-s1: learner.lr = 0.5"


def test_a_remark_names_runs_that_different_commits_made(tmp_path: Path) -> None:
    facts = {
        "a-s1": {"commit": HASH, "earlier_commits": []},
        "a-s2": {"commit": HASH, "earlier_commits": []},
        "b-s1": {"commit": f"{OTHER}-dirty", "earlier_commits": [HASH]},
        "b-s2": {},
        "c-s1": {"commit": None, "versions": {"bapo": "0.1.0"}},
    }
    for name, fields in facts.items():
        write_run(tmp_path / name, seed=int(name[-1])).update_run(**fields)
    assert remarks(gather([tmp_path / name for name in ("a-s1", "a-s2")])) == []
    assert remarks(gather([tmp_path / name for name in facts])) == [
        "seeds: a 1 2; b 1 2; c 1",
        "different commits: 0123456 (a-s1, a-s2); 0123456 then fffffff-dirty (b-s1); not recorded (b-s2); "
        "version 0.1.0 (c-s1)",
    ]
