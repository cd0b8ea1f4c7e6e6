"""Required settings of a run, and `--dry-run`, which checks the rest without starting anything."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from bapo.cli.arguments import say, split_tokens
from bapo.config.layers import Layer, file_layer, override_layers, preset_layers
from bapo.config.load import dump_toml
from bapo.config.preset_list import PRESET_GROUPS
from bapo.config.tree import Config
from bapo.config.unused import unused_settings
from bapo.core.errors import ConfigError
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.run_directory.set_aside import set_aside

DEMO = "deploy/configs/demo.toml"
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything and print what would start.")]
HOW_TO_NAME = {
    "model": "pass --model.path MODEL, or set path in [model]",
    "task": "pass --task.name TASK, or set name in [task]",
}


def refuse_empty(tokens: Sequence[str] | None) -> None:
    """Reject a start without a config, with suggestions. Raises: ConfigError."""
    if tokens:
        return
    first_line, *other_presets = next(iter(PRESET_GROUPS.values()))
    demo = f"\n  the demo             bapo train {DEMO}" if Path(DEMO).is_file() else ""
    raise ConfigError(
        "no config given. Start with one of these:\n"
        "  your model and data  bapo init --model MODEL --data train.jsonl --reward rewards.py:score\n"
        f"                       bapo train run.toml{demo}\n"
        f"  a method             preset = {first_line!r} in run.toml; also {', '.join(other_presets)}\n"
        "                       bapo config presets lists all\n"
        "  a run that stopped   bapo train --resume RUN"
    )


def refuse_unnamed(tokens: Sequence[str], example: str = "") -> None:
    """Reject presets without effect, and a config that does not set model or task.

    Args:
        example: a valid command; default: the same with the demo's model and task.
    Raises: ConfigError.
    """
    command = f"bapo train {' '.join(tokens)} --model.path models/countdown-tiny --task.name countdown"
    refuse_unnamed_layers(layers_of(tokens), example or command)


def layers_of(tokens: Sequence[str]) -> list[Layer]:
    """The layers of the arguments of a command, without the presets beneath them."""
    files, overrides = split_tokens(tokens)
    return [*map(file_layer, files), *override_layers(overrides)]


def warn_of_unused(config: Config, layers: Sequence[Layer]) -> None:
    """Say which settings of the user's layers change nothing."""
    for line in unused_settings(config, layers):
        say(f"warning: {line}")


def refuse_unnamed_layers(layers: Sequence[Layer], example: str) -> None:
    """The same of layers."""
    named = [(layer, str(layer.values["preset"])) for layer in layers if "preset" in layer.values]
    in_effect = named[-1][1] if named else None
    for layer, name in named[:-1]:
        if layer.source.startswith("preset ") and name != in_effect:
            raise ConfigError(
                f"presets {name} and {in_effect} are both given, but a run has one: remove {name}, or select it with "
                f"--preset {name}"
            )
    beneath = preset_layers(in_effect) if in_effect else []
    missing = [
        what for what, key in (("model", "path"), ("task", "name")) if not _names([*beneath, *layers], what, key)
    ]
    if missing:
        where = f"preset {in_effect}" if in_effect else "the config"
        raise ConfigError(
            "\n".join(f"{where} does not set a {what}: {HOW_TO_NAME[what]}" for what in missing)
            + "\nfor example: "
            + example
            + "; or create a config with bapo init"
        )


def _names(layers: Sequence[Layer], section: str, key: str) -> bool:
    tables = [layer.values.get(section) for layer in layers]
    return any(isinstance(table, dict) and key in table for table in tables)


def dry_run_of(config: Config, verb: str) -> None:
    """Run the fast checks of the config on this machine; exits with code 0 or 2."""
    launch("dry-run", config, "--for", verb)


def launch(verb: str, config: Config, *flags: str) -> None:
    """Run a launcher command that takes a config instead of a run; exits with its exit code."""
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix=f"bapo-{verb}-") as folder:
        path = Path(folder) / "config.toml"
        path.write_text(dump_toml(config), encoding="utf-8")
        command = [sys.executable, "-m", "services.launcher", verb, "--config", str(path), *flags]
        code = subprocess.run(command, check=False).returncode
    raise typer.Exit(code)


def create_run(config: Config) -> RunDirectory:
    """Create a run directory with the resolved config; one of this name that trained nothing is moved aside.

    Raises: ConfigError if it exists.
    """
    path = Path(config.run.root) / config.run.name
    if path.exists() and (moved := set_aside(RunDirectory(path))):
        say(f"the earlier run {path} trained nothing and is kept as {moved}")
    return RunDirectory.create(path, dump_toml(config))
