"""`bapo config show|diff|presets|schema`: resolved config of a run, differences, presets, JSON schema."""

from __future__ import annotations

import json
import re
from typing import Annotated

import typer

from bapo.cli.arguments import TAKES_OVERRIDES, Tokens, load, say
from bapo.cli.help import Command, group
from bapo.config.load import diff, dump_toml, load_config
from bapo.config.preset_list import PRESET_GROUPS, about_preset
from bapo.config.tree import Config

FIRST_SENTENCE = re.compile(r"(?<!Dr)[.] (?=[A-Z])")

app = group("Show, compare and describe configs; list the presets.")


@app.command(cls=Command, context_settings=TAKES_OVERRIDES)
def show(config: Tokens = None) -> None:
    """Print the resolved config as TOML.

    Examples:

      bapo config show run.toml
      bapo config show --preset bapo --learner.lr 1e-4
    """
    typer.echo(dump_toml(load(config)), nl=False)


@app.command("diff", cls=Command, context_settings=TAKES_OVERRIDES)
def show_diff(
    config: Tokens = None,
    against: Annotated[
        str | None, typer.Option("--against", metavar="CONFIG", help="File or preset; default: the preset of CONFIG.")
    ] = None,
) -> None:
    """Print every setting that differs from the preset, or from another config.

    Examples:

      bapo config diff deploy/configs/demo.toml --against grpo
    """
    mine = load(config)
    beneath = against or mine.preset
    other = load_config([beneath], []) if beneath else Config()
    for line in diff(other, mine):
        typer.echo(line)


@app.command(cls=Command)
def presets() -> None:
    """List the presets by group, with a one-line description; "Start here" comes first.

    Examples:

      bapo config presets
    """
    width = max(len(name) for names in PRESET_GROUPS.values() for name in names)
    for heading, names in PRESET_GROUPS.items():
        say(f"\n{heading}")
        for name in names:
            say(f"  {name:{width}}  {FIRST_SENTENCE.split(about_preset(name))[0].rstrip('.')}")


@app.command(cls=Command)
def schema() -> None:
    """Print the JSON schema of the config: every setting with type, default, bounds and description.

    Examples:

      bapo config schema > bapo.schema.json
    """
    typer.echo(json.dumps(Config.model_json_schema(), indent=2))
