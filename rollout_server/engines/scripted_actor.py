"""The scripted engine in one Ray actor per worker, for tests of clusters.

Weights are transferred to each host and verified, but not used.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollout_server.engines.scripted import check as check
from rollout_server.engines.scripted import make_engine as make_engine
from rollout_server.engines.scripted import make_tokenization as make_tokenization

ENVIRONMENT: Mapping[str, str] = {"OMP_NUM_THREADS": "1"}
IN_PROCESS = False
