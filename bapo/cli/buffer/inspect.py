"""`bapo buffer stats`: counts of a live buffer."""

from __future__ import annotations

from collections.abc import Iterator

from bapo.cli.buffer.target import AsJson, BufferOrLatest, facts, make_console, print_json, reach, shown, size, table
from bapo.core.json_values import to_map
from bapo.transport.messages import BufferStatus

BATCH_COLUMNS = ("step", "x1", "x2", "x3", "r_tot", "c2", "c3", "num_bad", "num_high", "staleness_max")


def stats(buffer: BufferOrLatest = "latest", as_json: AsJson = False) -> None:
    """Show counts: requests, groups, B_bad, B_high, workers and the latest batches.

    Examples:

      bapo buffer stats outputs/demo-001
      bapo buffer stats http://127.0.0.1:8700 --json
    """
    with reach(buffer) as where:
        status, counters = where.client.status(), where.admin.counters()
    if as_json:
        print_json({**to_map(status), "counters": counters})
        return
    console = make_console()
    console.print(facts(list(_status_lines(status, where.url))))
    queues = [
        {"requests": purpose, "queued": status.queued[purpose], "leased": status.leased[purpose]}
        for purpose in status.queued
    ]
    console.print()
    console.print(table(("requests", "queued", "leased"), queues, ids=("requests",)))
    if status.batches:
        console.print()
        console.print(table(BATCH_COLUMNS, status.batches))
    if counters:
        console.print()
        console.print(facts([("events", "   ".join(f"{name} {count}" for name, count in sorted(counters.items())))]))


def _status_lines(status: BufferStatus, url: str) -> Iterator[tuple[str, str]]:
    yield "run", f"{status.run} at {url}"
    yield "learner", f"in step {status.step}, published policy version {status.policy_version}"
    yield (
        "steps",
        f"{status.assembled_step} assembled, {status.committed_step} trained, {status.checkpointed_step} checkpointed",
    )
    yield (
        "groups",
        f"{status.fresh_ready} fresh, {status.reevaluated_ready} re-evaluated; {size(status.num_bytes)} stored",
    )
    yield "B_bad", f"{status.num_bad} prompts"
    edges = ", ".join(f"{name} {shown(value)}" for name, value in {**status.facts, "r_tot": status.r_tot}.items())
    yield "B_high", f"{status.num_high} groups; {edges}"
    for label, settled in status.evaluations.items():
        yield "evaluation", f"{label}: {settled} requests finished"
    for worker, leases in status.workers.items():
        yield "worker", f"{worker}: {leases.leased} leased, last call {leases.silent_s:.0f} s ago"
    if status.failures_in_a_row:
        yield "failures", f"{status.failures_in_a_row} in a row, latest: {status.last_failure}"
