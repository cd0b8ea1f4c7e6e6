"""`python -m tests.full.chaos.launcher train --run-dir RUN [--resume]`: the launcher, with proxies between the parts.

The parts and their supervision are the product's own. They keep ledgers (`tests.full.chaos.part`), and reach each other
through the addresses of BAPO_CHAOS_ROUTES, a JSON map {"<link>": url} with the links of `tests.support.network`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.launcher import __main__ as launcher
from services.launcher import session
from services.launcher.processes import LEARNER, Starter
from services.launcher.supervision.child_process import ProcessSpec

ROUTES = "BAPO_CHAOS_ROUTES"
FLAGS = {
    "buffer_service": {"redis": "--redis-url"},
    "rollout_server": {"workers": "--buffer-url"},
    "learner": {"learner": "--buffer-url", "fleet": "--rollout-url"},
    "services.scheduler": {"scheduler": "--buffer-url"},
    "services.evaluator": {"evaluator": "--buffer-url"},
}
"""Package -> link -> the flag that sends it there. argparse takes the last of two."""


class ChaosStarter(Starter):
    """Makes the specs of one run, each told to go through its proxies."""

    routes: Mapping[str, str] = {}

    def _spec(self, name: str, package: str, *flags: str, **fields: Any) -> ProcessSpec:
        links = FLAGS[package]
        detours = [token for link, flag in links.items() if link in self.routes for token in (flag, self.routes[link])]
        spec = super()._spec(name, package, *flags, *detours, **fields)
        module = spec.argv.index(package)
        return replace(spec, argv=(*spec.argv[:module], "tests.full.chaos.part", *spec.argv[module:]))


def main() -> int:
    """The launcher's own main."""
    assert LEARNER in FLAGS
    ChaosStarter.routes = json.loads(os.environ.get(ROUTES, "{}"))
    session.Starter = ChaosStarter  # type: ignore[misc]
    return launcher.main()


if __name__ == "__main__":
    sys.exit(main())
