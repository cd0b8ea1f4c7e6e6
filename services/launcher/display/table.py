"""The live view: starting processes, then one row per step. Pure: renders a snapshot at a width.

At 80 columns the numbers fit; a wider terminal also shows each batch as a bar of X1, X2, X3 against B, and a wide one
what the optimizer did and how certain the held-out change is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bapo.core.correctness import ACCURACY, measure_of
from bapo.core.statistics import shared_means
from bapo.core.text import ORIGIN_COLORS, ORIGINS, count, duration, num_groups, percent, staleness
from bapo.runtime.run_directory.shortfall import NEARLY_EMPTY
from bapo.transport.rollout_client import AgentsStatus
from services.launcher.display.snapshot import Snapshot
from services.launcher.display.summary import change_text, losses, told
from services.launcher.supervision.children import ProcessLine
from services.stalls import blocked_on

NUM_ROWS = 10
"""Number of visible steps, if the terminal is high enough."""
OTHER_ROWS = 14
LABEL_CHARS = 11
"""Width of the longest label and its gap."""
GAP = "   "
NARROW = 100
"""Below this width there is no room for the bar."""
WIDE = 160
"""From this width on there is room for the columns of `OPTIMIZER`, 60 characters, too."""
OPTIMIZER = {
    "entropy": ("entropy", ".3f"), "grad": ("grad_norm", ".2f"), "KL": ("kl", ".4f"), "clipped": ("clip_ratio", ".2%"),
    "truncated": ("truncated", ".1%"), "lr": ("lr", ".1e"), "update": ("update_s", ".2f"), "sync": ("sync_s", ".2f"),
}  # fmt: skip
"""Column of a wide table -> key of metrics.jsonl and format; `-` where a step has no value."""
AGES = {"X1 stale": "x1", "X3 stale": "x3"}
"""Staleness columns: of fresh groups, which the cadence bounds, and of reused groups, which it does not."""
BLOCKS = {"x1": "█", "x2": "▓", "x3": "▒"}
MARKS = {"starting": ("…", "yellow"), "ready": ("✓", "green"), "ended": ("·", "bright_black")}


def render(snapshot: Snapshot, width: int, height: int = 24) -> RenderableType:
    parts: list[RenderableType] = [_headline(snapshot, width)]
    lost = list(losses(snapshot.counters, snapshot.metrics, snapshot.last_failure))
    starting = any(process.state == "starting" for process in snapshot.processes)
    if snapshot.processes and (starting or not snapshot.metrics):
        parts.append(_processes(snapshot.processes))
    if snapshot.metrics:
        num_other = OTHER_ROWS + len(lost) + len([*told(snapshot.metrics)])
        parts.append(_steps(snapshot, width, max(3, min(NUM_ROWS, height - num_other))))
    parts.extend(_facts(snapshot, width, lost))
    return Group(*parts)


def _headline(snapshot: Snapshot, width: int) -> Text:
    share = snapshot.step / snapshot.num_steps
    bar_width = max(8, min(40, width - 61 - len(snapshot.name)))
    filled = round(share * bar_width)
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(snapshot.name, "bold").append(f"  {snapshot.method}  ", "bright_black")
    if snapshot.is_evaluation:
        text.append("evaluation")
    else:
        text.append(f"step {snapshot.step}/{snapshot.num_steps} ")
        text.append("━" * filled, "green").append("━" * (bar_width - filled), "bright_black")
    text.append(f" {duration(snapshot.elapsed_s)} elapsed", "bright_black")
    if snapshot.left_s is not None:
        text.append(f", about {duration(snapshot.left_s)} left", "bright_black")
    return text


def _processes(processes: Sequence[ProcessLine]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for process in processes:
        mark, colour = MARKS[process.state]
        hint = Text(process.hint if process.state == "starting" else "", "bright_black")
        seconds = Text(f"{process.seconds:.1f} s", justify="right")
        table.add_row(Text(mark, colour), process.name, Text(process.state, colour), seconds, hint)
    return Padding(table, (1, 0, 0, 0))


def _steps(snapshot: Snapshot, width: int, num_rows: int) -> RenderableType:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bright_black", pad_edge=False)
    for name in ("step", "reward"):
        table.add_column(name, justify="right")
    for origin in ORIGINS:
        table.add_column(origin.upper(), justify="right", style=ORIGIN_COLORS[origin], min_width=3)
    table.add_column(f"of {snapshot.batch_size}", justify="right")
    if width >= NARROW:
        table.add_column(" ".join(f"{origin.upper()} {BLOCKS[origin]}" for origin in ORIGINS), min_width=20)
    for name in ("B_bad", "B_high", *AGES, "tok/s", "s/step", "wait"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = snapshot.metrics[-num_rows:]
    more = [name for name in OPTIMIZER if width >= WIDE and any(_optimizer(row, name) != "-" for row in rows)]
    for name in more:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row, snapshot.batch_size, width), *(_optimizer(row, name) for name in more))
    return Padding(table, (1, 0, 0, 0))


def _cells(row: Mapping[str, Any], batch_size: int, width: int) -> Iterator[RenderableType]:
    yield str(row["step"])
    yield f"{row['reward_mean']:.3f}"
    for origin in ORIGINS:
        yield str(row[origin])
    total = num_groups(row)
    yield Text(str(total), "yellow" if total < NEARLY_EMPTY * batch_size else "")
    if width >= NARROW:
        room = width - NARROW + 20
        yield _composition(row, batch_size, min(60, room - 60 if width >= WIDE else room))
    yield str(row["num_bad"])
    yield str(row["num_high"])
    for origin in AGES.values():
        age = staleness(row, origin)
        yield "-" if age is None else str(age)
    yield count(row["tokens_per_s"])
    yield f"{row['step_s']:.2f}"
    yield f"{row['wait_batch_s']:.1f} s"


def _optimizer(row: Mapping[str, Any], name: str) -> str:
    key, form = OPTIMIZER[name]
    if key == "truncated":
        value = row["num_truncated"] / row["num_responses"] if row.get("num_responses") else None
    else:
        value = row.get(key)
    return "-" if value is None else format(value, form).replace("%", " %")


def _composition(row: Mapping[str, Any], batch_size: int, width: int) -> Text:
    text = Text(no_wrap=True)
    drawn = 0
    total = 0
    for origin in ORIGINS:
        total += int(row[origin])
        # Rounding the sums, not the parts, keeps the bar's length right.
        end = round(min(total, batch_size) * width / batch_size)
        text.append(BLOCKS[origin] * (end - drawn), ORIGIN_COLORS[origin])
        drawn = end
    return text.append("·" * (width - drawn), "bright_black")


def _facts(snapshot: Snapshot, width: int, lost: Sequence[tuple[str, str]]) -> Iterator[RenderableType]:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bright_black", no_wrap=True)
    table.add_column(overflow="fold")
    if snapshot.evaluations:
        parts = accuracies(snapshot.evaluations, with_change=width >= WIDE, has_step=not snapshot.is_evaluation)
        table.add_row("held-out", packed(parts, width - LABEL_CHARS))
    if snapshot.status is not None:
        # Text, because a failure message may contain brackets, which are not markup.
        table.add_row("now", Text(blocked_on(snapshot.status, snapshot.batch_size, snapshot.num_steps)))
    for what, sentence in told(snapshot.metrics):
        table.add_row(what, Text(sentence))
    if snapshot.agents is not None:
        table.add_row("agents", Text(agents_sentence(snapshot.agents, snapshot.waits_for_agents)))
    for what, sentence in lost:
        table.add_row(Text(what, "yellow"), Text(sentence))
    if snapshot.metrics and snapshot.metrics[-1].get("warning"):
        table.add_row(Text("warning", "yellow"), Text(snapshot.metrics[-1]["warning"]))
    if snapshot.workers:
        table.add_row("workers", packed(_workers(snapshot), width - LABEL_CHARS))
    if table.rows:
        yield Padding(table, (1, 0, 0, 0))


def agents_sentence(agents: AgentsStatus, command: str = "") -> str:
    """How many episodes agents have, and how many attempts have failed and why.

    Args:
        command: what to type where episodes wait and no agent has come.
    """
    sentence = f"{agents.num_open} episodes open, {agents.num_waiting} waiting"
    if command and agents.num_waiting and not agents.num_open:
        sentence = f"{agents.num_waiting} episodes wait for an agent: {command} (address {agents.base_url})"
    if not agents.failed:
        return sentence
    reasons = ", ".join(f"{number} {reason}" for reason, number in Counter(agents.failed).most_common())
    return f"{sentence}; failed attempts: {reasons}; the last: {agents.last_failure}"


def packed(parts: Iterable[str], width: int) -> Text:
    """As many parts per line as fit, without breaking a part."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(GAP) + len(part) <= width:
            lines[-1] += GAP + part
        else:
            lines.append(part)
    return Text("\n".join(lines))


def accuracies(
    evaluations: Sequence[Mapping[str, Any]], *, with_change: bool = False, has_step: bool = True
) -> Iterator[str]:
    """`cd34 34.2 % -> 41.6 % (step 50)`: first and latest evaluation on their common prompts; with partial credit
    `cd34 mean reward 10.8 % -> ...`.

    An evaluation during the run has only the first prompts; the change is over those. `with_change`: also the change in
    points with its 95 % interval.
    """
    for split in dict.fromkeys(row["split"] for row in evaluations):
        rows = [row for row in evaluations if row["split"] == split]
        first, newest = rows[0], rows[-1]
        named = split if (measure := measure_of(rows)) == ACCURACY else f"{split} {measure}"
        if first is newest:
            yield f"{named} {percent(first['accuracy'])}" + (f" (step {first['step']})" if has_step else "")
            continue
        before, after = shared_means([first["rewards"], newest["rewards"]])
        part = f", first {len(after)} prompts" if 0 < len(after) < first["num_prompts"] else ""
        change = f": {change_text(first, newest)} points" if with_change and len(after) > 1 else ""
        accuracy = f"{_accuracy(first, before)} -> {_accuracy(newest, after)}"
        yield f"{named} {accuracy}{change} (step {newest['step']}{part})"


def _accuracy(row: Mapping[str, Any], means: Sequence[float]) -> str:
    return percent(sum(means) / len(means) if means else row["accuracy"])


def _workers(snapshot: Snapshot) -> Iterator[str]:
    for worker in snapshot.workers:
        if worker.state == "ready":
            waiting = f"; {worker.waiting_for}" if worker.waiting_for else ""
            yield f"{worker.worker_id}: version {worker.policy_version}, {count(worker.tokens_per_s)} tokens/s{waiting}"
        else:
            yield f"{worker.worker_id}: {worker.state}"
