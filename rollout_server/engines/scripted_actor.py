"""The scripted engine in a process of its own per worker, as Ray actors: what a cluster does, without a model.

For tests of several hosts: weights travel to each host and are checked, and are then thrown away.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollout_server.engines.scripted import check as check
from rollout_server.engines.scripted import make_engine as make_engine

ENVIRONMENT: Mapping[str, str] = {"OMP_NUM_THREADS": "1"}
IN_PROCESS = False
