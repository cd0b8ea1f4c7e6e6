"""What a run of agents needs before it starts: its rollout function, and a chat template."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path

from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.core.user_code import load_function
from bapo.runtime.model_files import folder_of
from services.launcher.doctor.checks import Check

NAME = "agents"
PREFIXES = ("env", "tools", "trl", "verifiers", "openenv", "skyrl_gym")
"""Of environments (`services.agents.rollouts`), which their own processes load."""


def agents(config: Config) -> Iterator[Check]:
    """Nothing for a run without."""
    settings = config.agents
    if settings is None:
        return
    yield _rollout(settings.rollout)
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


def _rollout(name: str | None) -> Check:
    if name is None:
        return Check(name=NAME, status="ok", detail="agents outside open episodes (docs/agents.md)")
    if name.partition(":")[0] in PREFIXES:
        return Check(name=NAME, status="ok", detail=f"episodes by {name}, which its processes load")
    try:
        function = load_function(name, key="agents.rollout")
    except ConfigError as error:
        return Check(name=NAME, status="fail", detail=str(error))
    if not inspect.iscoroutinefunction(function):
        detail = f"agents.rollout = {name!r} is not an async function: write `async def rollout(client, prompt)`"
        return Check(name=NAME, status="fail", detail=detail)
    return Check(name=NAME, status="ok", detail=f"episodes by {name}")


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer of a model has one."""
    if any(folder.glob("chat_template*")) or (folder / "additional_chat_templates").is_dir():
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and bool(json.loads(settings.read_text()).get("chat_template"))
