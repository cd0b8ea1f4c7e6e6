"""`python -m services.agents.check < SETTINGS.json`: whether `agents.rollout` can run, in a process of its own.

What a process of agents does before its first episode: imports the user's code, or that of an environment's package.
Ends with exit code 0, or with one line on stderr.
"""

from __future__ import annotations

import subprocess
import sys

from bapo.config.agents import AgentsConfig
from bapo.core.errors import BapoError, ConfigError
from bapo.runtime.standard_streams import print_any_text
from services.agents.rollouts import load_rollout, standalone_command, standalone_of

CHECK_S = 120.0


def check(settings: AgentsConfig) -> None:
    """Raises: ConfigError."""
    assert settings.rollout is not None
    if standalone_of(settings.rollout) is None:
        load_rollout(settings.rollout, settings)
        return
    command = [*standalone_command(settings.rollout, settings, ""), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=CHECK_S, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(f"agents.rollout = {settings.rollout!r} cannot be loaded by {command[0]}: {said[-1]}")


if __name__ == "__main__":
    print_any_text()
    try:
        check(AgentsConfig.model_validate_json(sys.stdin.read()))
    except BapoError as error:
        sys.exit(str(error))
