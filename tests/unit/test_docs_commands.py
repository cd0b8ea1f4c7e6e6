"""Every command of README.md and docs/*.md is one that exists; the cheap ones run; links lead somewhere; examples work.

A `bapo` line is parsed by the real command line, its overrides and files by the real configuration. What does not run
here runs in the test that `ELSEWHERE` names, or `EXCUSED` says why it runs in none; a line of a shell block that is
neither fails. Lines of `python` are in test_docs_modules.py.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from typer.testing import CliRunner

from bapo.cli import app
from bapo.commands.arguments import TAKES_OVERRIDES, split_tokens
from bapo.commands.standalone import NOT_OURS
from bapo.config.load import load_config
from tests.unit.docs_pages import (
    ALL_PAGES,
    PAGES,
    REPOSITORY,
    Block,
    blocks,
    commands,
    lines_of,
    links,
    parts_of,
    program,
    slugs,
)

RUNS_HERE = {"plan-capacity", "config show", "config diff", "config presets", "create", "tokens create"}
"""Cheap and without effects outside of the working directory; `--dry-run` runs too."""

ELSEWHERE = {
    "train": "tests/full/test_demo.py",
    "up": "tests/process/test_up_buffer.py",
    "study": "tests/smoke/test_study.py",
    "watch": "tests/process/test_launcher.py",
    "scale": "tests/smoke/test_pipeline_scripted.py",
    "compare": "tests/full/test_comparison_page.py",
    "report": "tests/full/test_comparison_page.py",
    "simulate": "tests/unit/test_simulate.py",
    "explain": "tests/unit/test_explain.py",
    "replay": "tests/smoke/test_whatif_scripted.py",
    "doctor": "tests/process/test_launcher.py",
    "buffer": "tests/contract/test_buffer_commands.py",
    "tokens": "tests/unit/test_tokens.py",
    "reward": "tests/process/test_reward_command.py",
    "plan-capacity": "tests/unit/test_capacity.py",
    "track": "tests/unit/test_track.py",
    "view": "tests/contract/test_web_routes.py",
    "config": "tests/unit/test_cli.py",
    "eval": "tests/unit/test_cli.py",
    "create": "tests/unit/test_cli.py",
}
"""Command of `bapo` -> where it runs, because it needs a run, a service or minutes."""

SCRIPTS = {"deploy/k8s/secrets.sh": "tests/full/test_kubernetes.py"}
"""Other programs of ours -> where they run."""

EXCUSED = {
    "docker": "needs a Docker engine; the deployment's own check runs them",
    "kubectl": "needs a cluster",
    "helm": "needs a cluster",
    "kind": "needs a Docker engine",
    "ray": "needs other hosts; tests/full/chaos/test_hosts.py starts such a cluster",
    "prometheus": "goes on until it is stopped; tests/full/test_metrics_live.py starts one on such a file",
    "apt-get": "installs from a registry",
    "npm": "installs from a registry",
    "curl": "asks a service that another command of the page has started",
    "pip": "installs from a registry",
    "pip-audit": "asks a registry for advisories",
    "promtool": "comes with Prometheus",
    "ssh": "needs another host",
    "vllm": "not ours; checkpoints load in tests/full/test_vllm_engine.py",
    "cp": "copies a file",
    "tar": "needs a pod that unpacks",
    "unshare": "needs root, and minutes of a Ray cluster",
    "export": "sets a variable",
    "source": "changes the shell that reads it",
}

COMMANDS = sorted({(page.relative_to(REPOSITORY).as_posix(), line) for page in PAGES for line in commands(page)})
BAPO = [(page, line) for page, line in COMMANDS if program(line) == "bapo"]
MAKE = [(page, line) for page, line in COMMANDS if program(line) == "make"]


def _resolved(words: list[str]) -> tuple[str, click.Command, list[str]]:
    """("config show", its command, its arguments). Raises: click.UsageError for a command that is not there."""
    command: Any = typer.main.get_command(app)
    path: list[str] = []
    context = click.Context(command)
    while hasattr(command, "resolve_command"):
        name, command, words = command.resolve_command(context, words)
        context = click.Context(command, parent=context, info_name=name)
        path.append(name)
    return " ".join(path), command, words


def test_the_pages_have_commands_of_every_kind() -> None:
    assert len(BAPO) > 40
    assert len(MAKE) > 3
    assert {"python", "ray", "docker", "kubectl", "deploy/k8s/secrets.sh"} <= {program(line) for _, line in COMMANDS}


def test_a_line_is_taken_apart_as_a_shell_does() -> None:
    line = "RAY_ADDRESS=h:1 bapo train a.toml --x '{a | b}' | sudo kubectl apply -f - && bapo doctor  words"
    assert parts_of(line) == ["bapo train a.toml --x '{a | b}'", "kubectl apply -f -", "bapo doctor"]
    assert parts_of("curl -d '{\"a\":  1; 2}' x &") == ["curl -d '{\"a\":  1; 2}' x"]
    asked = Block("page", "", "$ curl \\\n    -d '{\n  \"a\"}'  # why\nanswer | 1\n\n$ make x\n")
    assert lines_of(asked) == ["curl -d '{ \"a\"}'", "make x"]
    assert lines_of(Block("page", "sh", "# why\nVAR=1 bapo x   # y\n")) == ["VAR=1 bapo x"]
    assert [program(c) for c in ("python3.11 -m venv", "V/bin/pip i", ".venv/bin/bapo", "deploy/k8s/secrets.sh x")] == [
        "python", "pip", "bapo", "deploy/k8s/secrets.sh",
    ]  # fmt: skip


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_every_line_of_a_shell_block_is_a_command_that_runs_somewhere_or_says_why_not(page: str, line: str) -> None:
    assert program(line) in {"bapo", "python", "make"} | SCRIPTS.keys() | EXCUSED.keys(), (
        f"{page}: {line!r} is no command of ours and has no reason in EXCUSED; a block that nobody types is ```text"
    )


@pytest.mark.parametrize(("page", "line"), BAPO)
def test_the_command_line_takes_what_the_page_says(page: str, line: str) -> None:
    path, command, words = _resolved(shlex.split(line.replace("...", ""))[1:])
    settings = command.context_settings
    context = command.make_context(path, list(words), **settings)
    assert context is not None
    assert path.split()[0] in ELSEWHERE
    if settings.get("ignore_unknown_options") == TAKES_OVERRIDES["ignore_unknown_options"]:
        tokens = [*(context.params.get("config") or []), *context.args]
        files, overrides = split_tokens([token for token in tokens if token != "buffer"])
        if path != "simulate":  # its CONFIG is a run
            known = [name for name in files if not name.endswith(".toml") or (REPOSITORY / name).exists()]
            # The buffer alone has no learner whose sizes must fit.
            ours = NOT_OURS if path == "up" and "buffer" in tokens else []
            load_config(
                [str(REPOSITORY / name) if name.endswith(".toml") else name for name in known], [*ours, *overrides]
            )


@pytest.mark.parametrize(("command", "where"), sorted({**ELSEWHERE, **SCRIPTS}.items()))
def test_what_runs_elsewhere_is_called_there(command: str, where: str) -> None:
    word = command.rsplit("/", 1)[-1]
    assert re.search(rf"""["']{re.escape(word)}["' ]""", (REPOSITORY / where).read_text(encoding="utf-8")), where


@pytest.mark.parametrize(("page", "line"), BAPO)
def test_cheap_commands_run(page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(line)[1:]
    path, _, _ = _resolved(list(words))
    names_a_file_of_yours = any(w.endswith(".toml") and not (REPOSITORY / w).exists() for w in words)
    if names_a_file_of_yours or not (path in RUNS_HERE or "--dry-run" in words):
        pytest.skip(f"runs in {ELSEWHERE[path.split()[0]]}")
    for folder in ("deploy", "models"):
        (tmp_path / folder).symlink_to(REPOSITORY / folder)
    monkeypatch.chdir(tmp_path)
    words = words[: words.index(">")] if ">" in words else words
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert result.output.strip()


@pytest.mark.parametrize(("page", "line"), MAKE)
def test_make_knows_what_it_would_do(page: str, line: str) -> None:
    words = ["make", "--dry-run", "--always-make", *line.split()[1:]]  # also what is made already
    said = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert ".venv" in said.stdout


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in links(page):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        if anchor and path.suffix == ".md":
            assert anchor in slugs(path), target


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages_that_are_named_in_passing_exist(page: Path) -> None:
    for name in set(re.findall(r"`(docs/[\w/-]+\.md|[a-z_]+/[\w/]+\.(?:py|toml))`", page.read_text(encoding="utf-8"))):
        assert (REPOSITORY / name).exists(), name


def test_the_index_has_every_page() -> None:
    index = REPOSITORY / "docs" / "index.md"
    missing = {page.name for page in (REPOSITORY / "docs").glob("*.md")} - set(links(index)) - {"index.md"}
    assert missing == set()


EXAMPLES = [
    (page, block.text)
    for page in (REPOSITORY / "README.md", REPOSITORY / "docs" / "bring-your-own.md")
    for block in blocks(page)
    if block.language == "python"
]


def test_python_examples_are_valid_everywhere() -> None:
    for page in PAGES:
        for block in blocks(page):
            if block.language == "python":
                ast.parse(block.text)


def test_toml_examples_are_valid_everywhere() -> None:
    for page in PAGES:
        for block in blocks(page):
            if block.language == "toml":
                tomllib.loads(block.text)


@pytest.fixture
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of docs/bring-your-own.md, as a reader would write them."""
    for _, text in EXAMPLES[1:]:
        name = re.match(r"# (\w+\.py)\n", text)
        assert name is not None, text
        (tmp_path / name[1]).write_text(text)
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(1, 9)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    return tmp_path


def test_the_rewards_of_the_page_are_fit_for_training_with_the_pages_own_commands(own_files: Path) -> None:
    page = REPOSITORY / "docs" / "bring-your-own.md"
    lines = [line for line in commands(page) if line.startswith("bapo reward test")]
    assert len(lines) == 2
    for line in lines:
        result = CliRunner().invoke(app, shlex.split(line)[1:])
        assert result.exit_code == 0, result.output


def test_the_task_of_the_page_is_made_by_its_configuration(own_files: Path) -> None:
    from bapo.tasks.registry import load_task

    configs = [
        tomllib.loads(block.text)["task"]
        for block in blocks(REPOSITORY / "docs" / "bring-your-own.md")
        if block.language == "toml"
    ]
    (own,) = (config for config in configs if config["name"].startswith("my_tasks.py"))
    task = load_task(own["name"], {})
    prompt = task.prompts("test")[3]
    assert (prompt.text, task.reward(prompt, " 6"), task.reward(prompt, "7")) == ("3+3=", 1.0, 0.0)
    (first,) = (config for config in configs if config.get("reward") == "my_rewards.py:exact")
    assert len(load_task(first["name"], first["options"]).prompts("train")) == 8


def test_the_readmes_reward_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bapo.tasks.base import make_prompt
    from bapo.tasks.rewards import load_reward

    page, text = EXAMPLES[0]
    assert page.name == "README.md"
    (tmp_path / "my_rewards.py").write_text(text)
    name = re.search(r'^reward = "([^"]+)"', page.read_text(), re.M)
    assert name is not None
    monkeypatch.chdir(tmp_path)
    reward = load_reward(name[1])
    prompt = make_prompt("sums", "1+1=", {"answer": "2"})
    assert (reward(prompt, "it is 2"), reward(prompt, "it is 3")) == (1.0, 0.0)


def _messages() -> list[str]:
    """Every string of the source, what varies cut out."""
    found = []
    folders = ("bapo", "buffer_service", "learner", "rollout_server", "services")
    for path in (path for folder in folders for path in (REPOSITORY / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_every_message_of_the_troubleshooting_page_is_in_the_source() -> None:
    page = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^> (.*)$", page, re.M)
    assert len(quoted) >= 20
    sources = _messages()
    for message in quoted:
        pattern = re.compile(".*".join(re.escape(part) for part in message.split("...")), re.S)
        assert any(pattern.search(source) for source in sources), message
