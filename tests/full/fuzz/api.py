"""`python -m tests.full.fuzz.api --redis URL [--examples N] [--seed S]`: the API against its description.

Every operation gets N requests, half of them such as the description allows and half such as it forbids. The service
must answer each without a 5xx, with a status, a type and a body that the description names, and in time. Prints one
JSON object: requests by operation and by status, the slowest answer, memory before and after.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.buffer import new_store, stored
from tests.support.buffer_app import served_app, small_config
from tests.support.dashboard_app import dashboard_app
from tests.support.factories import make_request
from tests.support.recorded_responses import write_rollout_run

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
SLOW_S = 5.0
LONGEST_WAIT_S = 0.01
"""Long polls are cut to this, because nobody comes."""


@dataclass
class Outcome:
    """What was sent and what came back."""

    requests: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    slowest: str = ""
    rss_mb: list[int] = field(default_factory=list)

    def took(self, operation: str, status: int, seconds: float) -> None:
        """One request."""
        self.requests[operation] += 1
        self.statuses[str(status)] += 1
        if seconds > self.slowest_s:
            self.slowest_s, self.slowest = seconds, operation


def fuzz(examples: int, *, number: int = 1, redis_url: str, only: str = "") -> Outcome:
    """Fuzz all operations of the buffer and of the dashboard, or those whose label holds `only`.

    Raises: what a check found.
    """
    store = new_store(redis_url, run="fuzz")
    stored(store, "abcd")
    store.enqueue([make_request(prompt_id="open")], cursor=None)
    outcome, process = Outcome(), psutil.Process()
    with tempfile.TemporaryDirectory() as folder:
        apps = (served_app(store, small_config()), dashboard_app(write_rollout_run(Path(folder) / "run")))
        schemas = [schemathesis.openapi.from_asgi("/openapi.json", app) for app in apps]
        for result in chain.from_iterable(schema.get_all_operations() for schema in schemas):
            operation = result.ok()
            if only in operation.label:
                _fuzz_operation(operation, examples, number, outcome)
                outcome.rss_mb.append(process.memory_info().rss >> 20)
    return outcome


def _fuzz_operation(operation: Any, examples: int, number: int, outcome: Outcome) -> None:
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
    for mode in modes:

        @seed(number)
        @settings(
            max_examples=max(1, examples // len(modes)),
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def run(case: Any) -> None:
            _shorten(case)
            began = time.monotonic()
            response = case.call()
            seconds = time.monotonic() - began
            outcome.took(operation.label, response.status_code, seconds)
            assert seconds < SLOW_S, f"{operation.label} took {seconds:.1f} s"
            case.validate_response(response, checks=CHECKS)

        with suppress(Unsatisfiable):  # nothing can be wrong with a request that has no parameters
            run()


def _shorten(case: Any) -> None:
    for holder in (case.query, case.body):
        if isinstance(holder, dict) and isinstance(holder.get("wait_s"), int | float):
            holder["wait_s"] = min(holder["wait_s"], LONGEST_WAIT_S)


def main() -> None:
    """Fuzz, and print what was done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=200, help="requests per operation (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--redis", required=True, help="URL of the Redis behind the service; run `fuzz` in it is replaced"
    )
    parser.add_argument("--only", default="", help="part of an operation's label")
    flags = parser.parse_args()
    outcome = fuzz(flags.examples, number=flags.seed, redis_url=flags.redis, only=flags.only)
    json.dump(
        {
            "requests": sum(outcome.requests.values()),
            "operations": len(outcome.requests),
            "statuses": dict(sorted(outcome.statuses.items())),
            "slowest_s": round(outcome.slowest_s, 3),
            "slowest": outcome.slowest,
            "rss_mb": [outcome.rss_mb[0], outcome.rss_mb[-1]],
        },
        sys.stdout,
        indent=2,
    )


if __name__ == "__main__":
    main()
