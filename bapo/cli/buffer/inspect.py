"""`bapo buffer stats|bad|high|groups|show`: inspect a live buffer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any

import typer

from bapo.cli.buffer.target import (
    AsJson,
    Buffer,
    BufferOrLatest,
    Limit,
    Offset,
    Where,
    facts,
    make_console,
    more,
    print_json,
    reach,
    shown,
    size,
    table,
)
from bapo.core.errors import AccessError, ContractError
from bapo.core.sequences import sequences_of
from bapo.core.types import PER_TOKEN, Group, Outcome
from bapo.transport.buffer_admin import Rows
from bapo.transport.messages import BufferStatus, status_map

BATCH_COLUMNS = ("step", "x1", "x2", "x3", "r_tot", "c2", "c3", "num_bad", "num_high", "staleness_max")
TEXT_CHARS = 300


def stats(buffer: BufferOrLatest = "latest", as_json: AsJson = False) -> None:
    """Show counts: requests, groups, B_bad, B_high, workers and the latest batches.

    Examples:

      bapo buffer stats outputs/demo-001
      bapo buffer stats http://127.0.0.1:8700 --json
    """
    with reach(buffer) as where:
        status, counters = where.client.status(), where.admin.counters()
    if as_json:
        print_json({**status_map(status), "counters": counters})
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


def bad(buffer: BufferOrLatest = "latest", offset: Offset = 0, limit: Limit = 20, as_json: AsJson = False) -> None:
    """List the hard prompts (B_bad), oldest first: mean reward, number of re-evaluations, text.

    Examples:

      bapo buffer bad outputs/demo-001 --limit 50
    """
    with reach(buffer) as where:
        rows = where.admin.bad(offset, limit)
        texts = _texts(where)
    items = [{**item, "text": texts.get(item["prompt_id"])} for item in rows.items]
    columns = ("prompt_id", "mu", "birth", "age", "attempts", "text")
    _page("B_bad", replace(rows, items=items), columns, offset, as_json=as_json)


def high(buffer: BufferOrLatest = "latest", offset: Offset = 0, limit: Limit = 20, as_json: AsJson = False) -> None:
    """List the reusable groups (B_high), oldest first: candidates for X3.

    Examples:

      bapo buffer high http://127.0.0.1:8700 --offset 20
    """
    with reach(buffer) as where:
        rows = where.admin.high(offset, limit)
    columns = ("group_id", "prompt_id", "mu", "birth", "age", "policy_version")
    _page("B_high", rows, columns, offset, as_json=as_json)


def groups(buffer: BufferOrLatest = "latest", offset: Offset = 0, limit: Limit = 20, as_json: AsJson = False) -> None:
    """List all stored groups by id, with the tables that contain them.

    Examples:

      bapo buffer groups outputs/demo-001 --limit 100
    """
    with reach(buffer) as where:
        rows = where.admin.held(offset, limit)
    if as_json:
        print_json({"total": rows.total, "offset": offset, "items": rows.items})
        return
    console = make_console()
    items = [
        {
            **item,
            "mu": sum(item["rewards"]) / len(item["rewards"]),
            "version": item["policy_version"],
            "tokens": item["num_tokens"],
            "where": _where(item["places"]),
        }
        for item in rows.items
    ]
    columns = ("group_id", "prompt_id", "mu", "step", "version", "tokens", "where")
    console.print(table(columns, items, ids=("group_id", "prompt_id"), folded=("where",)))
    console.print(f"groups {more(rows.total, offset, len(items))}", style="bright_black")


def show(
    buffer: Buffer,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="Id of a group, such as fresh-00000012.")],
    as_json: AsJson = False,
) -> None:
    """Show one group: its tables, its prompt, one line per response; tokens and log-probs with --json.

    Examples:

      bapo buffer show outputs/demo-001 fresh-00000012
    """
    with reach(buffer) as where:
        places = where.admin.places(group)
        if not places:
            raise ContractError(
                f"group {group} is not in the buffer at {where.url}: it is not sampled yet, already "
                "consumed, or was never requested"
            )
        found = where.admin.group(group)
    if as_json:
        print_json(_group_map(found, places))
        return
    console = make_console()
    console.print(facts(list(_group_lines(found, places))))
    console.print()
    console.print(table(("response", "reward", "tokens", "versions", "ended", "mean log-prob"), _responses(found)))


def _texts(where: Where) -> dict[str, str]:
    """Prompt id -> text of B_bad; empty for viewers, who may not read texts."""
    try:
        return {entry.prompt_id: prompt.text for entry, prompt in where.client.hard_prompts()}
    except AccessError:
        return {}


def _where(places: list[str]) -> str:
    """`high, batch 61 62 63`."""
    steps = [place.removeprefix("batch ") for place in places if place.startswith("batch ")]
    others = [place for place in places if not place.startswith("batch ")]
    return ", ".join([*others, *([f"batch {' '.join(steps)}"] if steps else [])])


def _page(what: str, rows: Rows, columns: tuple[str, ...], offset: int, *, as_json: bool) -> None:
    if as_json:
        print_json({"total": rows.total, "offset": offset, "step": rows.step, "items": rows.items})
        return
    console = make_console()
    if not rows.total:
        console.print(f"{what} is empty after step {rows.step}")
        return
    text = "text" if "text" in columns else ""
    console.print(table(columns, rows.items, ids=("group_id", "prompt_id"), clipped=text, width=console.width))
    console.print(f"{what} after step {rows.step}: {more(rows.total, offset, len(rows.items))}", style="bright_black")


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
    edges = f"c2 {shown(status.c2)}, c3 {shown(status.c3)}, r_tot {shown(status.r_tot)}"
    yield "B_high", f"{status.num_high} groups; {edges}"
    for label, settled in status.evaluations.items():
        yield "evaluation", f"{label}: {settled} requests finished"
    for worker, leases in status.workers.items():
        yield "worker", f"{worker}: {leases.leased} leased, last call {leases.silent_s:.0f} s ago"
    if status.failures_in_a_row:
        yield "failures", f"{status.failures_in_a_row} in a row, latest: {status.last_failure}"


def _group_lines(group: Group, places: list[str]) -> Iterator[tuple[str, str]]:
    text = group.prompt.text
    yield "group", group.group_id
    yield "where", ", ".join(places)
    yield "purpose", f"{group.purpose.value}, for step {group.step}" + (f", {group.label}" if group.label else "")
    yield "prompt", f"{group.prompt.prompt_id} ({group.prompt.task}, {len(group.prompt_token_ids)} tokens)"
    yield "text", text if len(text) <= TEXT_CHARS else f"{text[:TEXT_CHARS]}... ({len(text)} characters)"
    if group.prompt.images:
        yield "images", ", ".join(group.prompt.images)
    yield "answer", ", ".join(f"{key}={value}" for key, value in group.prompt.answer.items())
    yield "mu", f"{group.mu:.3f} of {group.size} responses"
    yield "worker", f"{group.worker_id}, {group.timing.sample_s:.2f} s sampling, {group.timing.grade_s:.2f} s grading"


def _responses(group: Group) -> list[dict[str, Any]]:
    return [
        {
            "response": index,
            "reward": float(group.rewards[index]),
            "tokens": len(response.token_ids),
            "versions": "-".join(str(version) for version in sorted(set(group.versions[index].tolist()))),
            "ended": response.outcome.name.lower(),
            "mean log-prob": float(response.rollout_logprobs.mean()),
        }
        for index, response in enumerate(sequences_of(group))
    ]


def _group_map(group: Group, places: list[str]) -> dict[str, Any]:
    return {
        "group_id": group.group_id,
        "prompt_id": group.prompt.prompt_id,
        "prompt": group.prompt.text,
        "task": group.prompt.task,
        "images": list(group.prompt.images),
        "answer": dict(group.prompt.answer),
        "purpose": group.purpose.value,
        "step": group.step,
        "label": group.label,
        "worker_id": group.worker_id,
        "policy_version": group.policy_version,
        "rewards": group.rewards.tolist(),
        "outcomes": [Outcome(value).name.lower() for value in group.outcomes],
        "versions": group.versions.tolist(),
        "prompt_token_ids": group.prompt_token_ids.tolist(),
        **{name: [getattr(response, name).tolist() for response in sequences_of(group)] for name in PER_TOKEN},
        "places": places,
    }
