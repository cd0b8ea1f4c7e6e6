"""`bapo buffer ...`: look into a live buffer, check it, export its groups, take something out."""

from __future__ import annotations

import typer

from bapo.commands import buffer_care, buffer_files, buffer_looks

app = typer.Typer(
    help="Look into a live buffer, check it, export its groups, take something out.",
    no_args_is_help=True,
)
app.command()(buffer_looks.stats)
app.command()(buffer_looks.bad)
app.command()(buffer_looks.high)
app.command()(buffer_looks.groups)
app.command()(buffer_looks.show)
app.command()(buffer_files.export)
app.command()(buffer_files.snapshot)
app.command()(buffer_files.restore)
app.command()(buffer_care.drop)
app.command()(buffer_care.verify)
