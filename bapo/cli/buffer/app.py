"""`bapo buffer ...`: inspect a live buffer, check it, export its groups, delete entries."""

from __future__ import annotations

import typer

from bapo.cli.buffer import files, inspect, maintain

app = typer.Typer(help="Inspect a live buffer, check it, export its groups, delete entries.", no_args_is_help=True)
app.command()(inspect.stats)
app.command()(inspect.bad)
app.command()(inspect.high)
app.command()(inspect.groups)
app.command()(inspect.show)
app.command()(files.export)
app.command()(files.snapshot)
app.command()(files.restore)
app.command()(maintain.drop)
app.command()(maintain.verify)
