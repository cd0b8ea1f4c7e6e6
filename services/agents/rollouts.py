"""What `agents.rollout` names.

    "file.py:function", "package.module:function"   async def rollout(client, prompt) -> float | GRADE | None
    "env:file.py:MyEnv"                             adapters/env.py: reset and step
    "tools:file.py:TOOLS"                           adapters/tools.py: plain functions
    "trl:file.py:MyEnv"                             adapters/trl.py: an environment_factory of TRL
    "verifiers:MODULE", "openenv:URL", "skyrl_gym:ID"   standalone.py, run by the interpreter `agents.python`

An adapter is one file of `adapters` with `make_rollout(name, settings)`; its name is the prefix.
"""

from __future__ import annotations

import inspect
import json
from importlib.util import find_spec
from pathlib import Path

from bapo.config.agents import AgentsConfig
from bapo.core.errors import ConfigError, did_you_mean
from bapo.core.plugins import module_names, plugin
from bapo.core.user_code import load_function
from bapo.runtime.python_environments import python_of
from services.agents import standalone
from services.agents.outcome import Rollout

ADAPTERS = "services.agents.adapters"
FACTORY = "make_rollout"
STANDALONE = ("openenv", "skyrl_gym", "verifiers")
"""Packages whose dependencies contradict ours: they run in an environment of their own."""
KEY = "agents.rollout"


def load_rollout(name: str, settings: AgentsConfig) -> Rollout:
    """The rollout function of that name. Imports the user's code. Raises: ConfigError."""
    prefix, _, rest = name.partition(":")
    adapters = module_names(ADAPTERS)
    if prefix in adapters and ":" in rest:  # `env:function` is a function of a module called env
        rollout: Rollout = getattr(plugin(ADAPTERS, prefix), FACTORY)(rest, settings)
        return rollout
    known = (*adapters, *STANDALONE)
    if ":" in rest or (rest and _is_missing(prefix)):
        raise ConfigError(
            f"{KEY} {name!r}: {prefix!r} is neither a module nor a prefix{did_you_mean(prefix, known)}; use "
            f"file.py:function, package.module:function, or one of the prefixes {', '.join(f'{one}:' for one in known)}"
        )
    function = load_function(name, key=KEY)
    if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(type(function).__call__):
        raise ConfigError(f"{KEY} = {name!r} is not an async function: write `async def rollout(client, prompt)`")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"{KEY} = {name!r} is called with two arguments: write `async def rollout(client, prompt)` ({error})"
        ) from error
    return function


def standalone_of(name: str) -> str | None:
    """The package of a rollout that runs in a Python of its own; None for one that runs in ours."""
    prefix, _, rest = name.partition(":")
    return prefix if prefix in STANDALONE and rest else None


def standalone_command(name: str, settings: AgentsConfig, url: str, *, agent: str = "") -> list[str]:
    """The program that runs such a rollout. Raises: ConfigError without its interpreter.

    Args:
        agent: of `EpisodeClient`.
    """
    kind = name.partition(":")[0]
    python = Path(settings.python) if settings.python is not None else python_of(kind)
    if not python.is_file():
        raise ConfigError(
            f"{KEY} = {name!r} needs a Python with the package {kind}, and {python} is not there: run "
            f"`bapo env install {kind}`, or set agents.python to the interpreter of an environment that has it"
        )
    # -P: the folder of the program has modules that a package may have, too.
    return [
        *(str(python), "-P", standalone.__file__, name, "--url", url, "--model", settings.model_name),
        *("--agent", agent),
        *("--episodes", str(settings.episodes_per_process), "--timeout-s", str(settings.timeout_s)),
        *("--max-turns", str(settings.max_turns), "--options", json.dumps(settings.options)),
    ]


def _is_missing(prefix: str) -> bool:
    return prefix.isidentifier() and find_spec(prefix) is None
