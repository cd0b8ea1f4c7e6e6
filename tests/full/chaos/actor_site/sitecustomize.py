"""Python imports this first where this folder is in PYTHONPATH: a worker in a Ray actor keeps a ledger, too.

Ray starts its workers by a script of its own, so nothing of ours can stand before it (as `tests.full.chaos.part` does).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if any(word.endswith("default_worker.py") for word in sys.orig_argv):
    from tests.full.chaos.ledger import Ledger
    from tests.full.chaos.part import LEDGER_FOLDER, keep_ledger

    keep_ledger(Ledger(Path(os.environ[LEDGER_FOLDER]), "worker"))
