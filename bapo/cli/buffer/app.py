"""`bapo buffer ...`: inspect a live buffer, check it, export its groups, delete entries."""

from __future__ import annotations

from bapo.cli.buffer import files, inspect, maintain
from bapo.cli.help import Command, group

app = group("Inspect, check, export and edit the buffer of a running run.")
app.command(cls=Command)(inspect.stats)
app.command(cls=Command)(inspect.bad)
app.command(cls=Command)(inspect.high)
app.command(cls=Command)(inspect.groups)
app.command(cls=Command)(inspect.show)
app.command(cls=Command)(files.export)
app.command(cls=Command)(files.snapshot)
app.command(cls=Command)(files.restore)
app.command(cls=Command)(maintain.drop)
app.command(cls=Command)(maintain.verify)
