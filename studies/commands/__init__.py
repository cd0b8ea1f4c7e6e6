"""The commands of this package: `bapo.cli.elsewhere` finds them by their names."""

from studies.commands.compare import compare, report
from studies.commands.study import study

__all__ = ["compare", "report", "study"]
