"""`python -m bapo.report RUN`."""

from __future__ import annotations

import sys

from bapo.errors import BapoError
from bapo.records import RunDirectory
from bapo.report.page import write_report


def main(argv: list[str]) -> int:
    """Write the page and say where it is."""
    try:
        path = write_report(RunDirectory.open(argv[0]))
    except BapoError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return error.exit_code
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
