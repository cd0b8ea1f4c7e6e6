"""What a run of agents needs before it starts: its rollout function, and a chat template."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from bapo.config.agents import AgentsConfig
from bapo.config.tree import Config
from bapo.core.errors import did_you_mean
from bapo.runtime.model_files import folder_of
from services.launcher.doctor.checks import Check

NAME = "agents"
CHECKED_BY = "services.agents.check"
"""Imports the user's code, or finds the Python of an environment's package, as the processes of agents do."""
CHECK_S = 180.0
LISTED = re.compile(r'^    "([^"]+)": \(', re.MULTILINE)
"""A parser in vLLM's list of them."""


def agents(config: Config) -> Iterator[Check]:
    """Nothing for a run without."""
    settings = config.agents
    if settings is None:
        return
    yield _rollout(settings)
    yield from _parsers(settings)
    if settings.timeout_s > config.learner.batch_timeout_s:
        yield Check(
            name=NAME,
            status="warn",
            detail=f"agents.timeout_s = {settings.timeout_s:g} is more than learner.batch_timeout_s = "
            f"{config.learner.batch_timeout_s:g}, after which a learner without a batch ends the run: raise that",
        )
    folder = folder_of(config.model.path)
    if folder is not None and not has_chat_template(folder):
        yield Check(
            name=NAME,
            status="warn",
            detail=f"{config.model.path} has no chat template: agents can call /v1/completions, and no conversation",
        )


def _rollout(settings: AgentsConfig) -> Check:
    if settings.rollout is None:
        return Check(name=NAME, status="ok", detail="agents outside open episodes (docs/agents.md)")
    command = [sys.executable, "-m", CHECKED_BY]
    try:
        done = subprocess.run(
            command, input=settings.model_dump_json(), capture_output=True, text=True, errors="replace",
            timeout=CHECK_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        detail = f"loading agents.rollout = {settings.rollout!r} takes longer than {CHECK_S:g} s"
        return Check(name=NAME, status="warn", detail=detail)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return Check(name=NAME, status="fail", detail=said[-1])
    return Check(name=NAME, status="ok", detail=f"episodes by {settings.rollout}")


def _parsers(settings: AgentsConfig) -> Iterator[Check]:
    """Parsers that the installed vLLM does not list; loading vLLM itself takes ten seconds."""
    vllm = find_spec("vllm")
    for key, folder in (("tool_call_parser", "tool_parsers"), ("reasoning_parser", "reasoning")):
        name = getattr(settings, key)
        listed = Path(vllm.origin).parent / folder / "__init__.py" if vllm is not None and vllm.origin else None
        if name is None or listed is None or not listed.is_file():
            continue
        known = LISTED.findall(listed.read_text())
        if known and name not in known:
            detail = f"agents.{key} = {name!r}: the installed vLLM has none of that name{did_you_mean(name, known)}"
            yield Check(name=NAME, status="fail", detail=f"{detail}; it has {', '.join(sorted(known))}")


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer of a model has one."""
    if any(folder.glob("chat_template*")) or (folder / "additional_chat_templates").is_dir():
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and bool(json.loads(settings.read_text()).get("chat_template"))
