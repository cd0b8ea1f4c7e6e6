"""Summary of a finished run in the terminal: held-out results before and after, time, failures, paths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bapo.algorithms.composer import Reason
from bapo.config.tree import Config
from bapo.core.correctness import ACCURACY, MEAN_REWARD, PASSES, mean_pass_at_k, measure_of, pass_sizes
from bapo.core.reward_details import shown_details
from bapo.core.statistics import change, over_shared
from bapo.core.text import count, duration, percent, with_interval
from bapo.core.types import num_sampled
from bapo.runtime.run_directory.best import best_first, measured, scope_of
from bapo.runtime.run_directory.curves import first_results
from bapo.runtime.run_directory.layout import EXPORT_FAILED, RunDirectory
from bapo.runtime.run_directory.rows import ended_early
from bapo.runtime.run_directory.shortfall import shortfall
from bapo.tasks.grading.pool import (
    UngradedError,
    VerifierKilledError,
    VerifierMemoryError,
    VerifierRaisedError,
    VerifierTimeoutError,
)

VERIFIER_REASONS = {
    error.reason
    for error in (UngradedError, VerifierKilledError, VerifierMemoryError, VerifierRaisedError, VerifierTimeoutError)
}

EPISODE = "episode_"
"""Begins the reasons of groups whose agents failed."""


def losses(
    counters: Mapping[str, int], metrics: Iterable[Mapping[str, Any]], last_failure: str = ""
) -> Iterator[tuple[str, str]]:
    """(kind, count with rate and most frequent reason) of what was sampled and not used; empty for a run without.

    Args:
        counters: event counters of the buffer, from `GET /counters`.
        metrics: rows of metrics.jsonl.
        last_failure: "reason: what failed, on which prompt", from the status of the buffer.
    """
    failed, pushed = _by_reason(counters, "failed_groups"), _by_reason(counters, "pushed_groups")
    num_tried = failed.total() + pushed.total()
    verifiers = Counter({reason: number for reason, number in failed.items() if reason in VERIFIER_REASONS})
    dropped = _by_reason(counters, "dropped_groups") + _by_reason(counters, "dropped_requests")
    for what, lost in (("verifiers", verifiers), ("failed", failed - verifiers), ("dropped", dropped)):
        if lost:
            ((reason, number),) = lost.most_common(1)
            rate = percent(lost.total() / max(num_tried, lost.total()))
            groups = f"{lost.total()} of {num_tried} groups ({rate}), most often {reason} ({number})"
            words = f"failed to grade {groups}" if what == "verifiers" else groups
            yield what, words + _last(last_failure, lost)
    metrics = list(metrics)
    if sentence := shortfall(metrics):
        yield "batches", sentence
    rows = [row for row in metrics if row.get("num_responses")]
    if num_truncated := sum(row["num_truncated"] for row in rows):
        num_responses = sum(row["num_responses"] for row in rows)
        rate = percent(num_truncated / num_responses)
        limits = "rollout.max_response_tokens" + " or agents.max_tokens" * any(row.get("num_episodes") for row in rows)
        yield "truncated", f"{num_truncated} of {num_responses} responses ({rate}), by {limits}"
    if sentence := untrained([row for row in rows if "num_informative" in row][-LATEST:]):
        yield "untrained", sentence


def episodes(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Turns, context, calls and forks of the newest step that had episodes; empty for a run without agents."""
    row = next((row for row in reversed(metrics) if row.get("num_episodes")), None)
    if row is None:
        return ""
    parts = [
        f"{row.get('episode_turns_mean') or 0:.1f} turns",
        f"{row.get('episode_context_tokens_mean') or 0:.0f} context tokens",
        *(f"{number:.1f} calls of {name}" for name, number in (row.get("episode_calls_mean") or {}).items()),
    ]
    forked, masked = row.get("episode_forked_share"), row.get("episode_masked_share")
    rest = f"; {percent(forked)} have a fork" if forked else ""
    rest += f"; {percent(masked)} of the tokens were too old to train (rollout.stale_tokens)" if masked else ""
    return f"each {', '.join(parts)} in the mean of step {row['step']}{rest}"


def rewards(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Components of the reward and facts of the newest step; empty for a run without."""
    row: Mapping[str, Any] = metrics[-1] if metrics else {}
    return f"{shown} in step {row['step']}" if (shown := shown_details(row)) else ""


def distillation(metrics: Sequence[Mapping[str, Any]]) -> str:
    """How far the policy is from its teacher, in the first and the newest step; empty for a run without one."""
    rows = [row for row in metrics if row.get("teacher_kl") is not None]
    if not rows:
        return ""
    first, newest = rows[0], rows[-1]
    return (
        f"reverse KL {first['teacher_kl']:.4f} -> {newest['teacher_kl']:.4f} nats per token (steps {first['step']} to "
        f"{newest['step']})"
    )


def told(metrics: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """(what, sentence) of what only some runs have: several rewards, episodes, a teacher."""
    for what, tell in (("rewards", rewards), ("episodes", episodes), ("teacher", distillation)):
        if sentence := tell(metrics):
            yield what, sentence


LATEST = 20
"""Steps over which most groups with different rewards must have been left out."""
FEWEST = 16
"""Groups with different rewards below which a majority says nothing."""
REMEDIES: dict[str, str] = {
    Reason.FILTERED: 'set algorithm.online_filter = "range"',
    Reason.STILL_HARD: "lower algorithm.c1",
    Reason.NO_ROOM: "raise algorithm.batch_size",
    Reason.SURPLUS: "raise algorithm.batch_size",
    Reason.STALE: "raise cadence.max_steps_ahead",
    Reason.DUPLICATE_PROMPT: "use more prompts",
}


def untrained(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many of the groups whose rewards differ did not train in these steps, why, and what to set; empty unless
    these are most of them."""
    num = sum(row["num_informative"] for row in rows)
    num_left_out = num - sum(row["num_informative_trained"] for row in rows)
    if num < FEWEST or 2 * num_left_out <= num:
        return ""
    reasons: Counter[str] = Counter()
    for row in rows:
        reasons.update(row["informative_left_out"])
    why = ", ".join(f"{number} {reason}" for reason, number in reasons.most_common())
    remedy = REMEDIES.get(reasons.most_common(1)[0][0], "`bapo explain RUN all STEP` says why")
    return (
        f"{num_left_out} of {num} groups whose rewards differ did not train in the last {len(rows)} steps ({why}); "
        f"{remedy}"
    )


def _last(failure: str, lost: Counter[str]) -> str:
    """The newest failure of this kind, and where the others are."""
    reason, _, detail = failure.partition(": ")
    if not detail or reason not in lost:
        return ""
    logs = "logs/rollout_server.log" if reason.startswith(EPISODE) else "logs/worker-*.log"
    return f"; the last: {detail}; all: {logs}"


def _by_reason(counters: Mapping[str, int], event: str) -> Counter[str]:
    """Reason -> count, from the counters `event:reason`."""
    return Counter({key.partition(":")[2]: number for key, number in counters.items() if key.startswith(f"{event}:")})


def summary(run: RunDirectory, config: Config) -> RenderableType:
    """Held-out results before and after per split, steps, rollouts and paths."""
    metrics, evaluations = run.read_metrics(), run.read_evaluations()
    parts: list[RenderableType] = [Text(f"\n{run.name} is finished", "bold green")]
    if evaluations:
        parts.append(_before_and_after(evaluations))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bright_black")
    table.add_column(overflow="fold")
    sizes = _sizes_sampled(run)
    wall_s = float(run.read_run().get("wall_s", 0.0))
    table.add_row("steps", f"{len(metrics)} in {duration(wall_s)} wall time, including startup")
    table.add_row("rollouts", f"{count(sum(sizes))} responses in {len(sizes)} groups for training")
    if reason := ended_early(metrics):
        table.add_row("ended", f"after step {metrics[-1]['step']} of {config.run.num_steps}: {reason}")
    if best := _best(run, evaluations, config):
        table.add_row("best", best)
    for what, sentence in told(metrics):
        table.add_row(what, Text(sentence))
    for split, row in {row["split"]: row for row in evaluations}.items():
        if sentence := shown_details(row):
            table.add_row(f"rewards, {split}", Text(sentence))
    for what, lost in losses_of(run):
        table.add_row(what, lost)
    table.add_row("page", f"bapo view {run.path} (needs no token)")
    table.add_row("report", str(run.report_path))
    for name, value in _checkpoints(run):
        table.add_row(name, value)
    return Group(*parts, Text(), table)


def _best(run: RunDirectory, evaluations: Sequence[Mapping[str, Any]], config: Config) -> str:
    """Which weights measured best of several, and how to get them; empty with one or two measurements, which the table
    of before and after has."""
    found = measured(evaluations, config.evaluation.best_measure)
    if len(found) < 3:
        return ""
    best = best_first(found)[0]
    where = "the base model" if best.step == 0 else f"after step {best.step}"
    has_checkpoint = best.step in run.checkpoint_steps()
    how = f"bapo export {run.path} --best" if has_checkpoint else "no checkpoint; checkpoint.keep_best = 1 keeps it"
    mean = f"{percent(best.mean)}{scope_of(best, evaluations)}"
    return f"{where}: {best.split} {mean}, the highest of {len(found)} measurements, so partly luck" + (
        f" ({how})" if best.step else ""
    )


def losses_of(run: RunDirectory) -> Iterator[tuple[str, str]]:
    """(kind, sentence) for each kind of loss of a run: verifiers, failed, dropped, truncated."""
    fields = run.read_run()
    return losses(fields.get("counters") or {}, run.read_metrics(), str(fields.get("last_failure") or ""))


def evaluation_summary(run: RunDirectory) -> RenderableType:
    evaluations = run.read_evaluations()
    if not evaluations:
        return Text("no evaluations")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black", pad_edge=False)
    measure = measure_of(evaluations)
    for name in ("held-out", "at", f"{measure} (95 %)", "average", "prompts", "truncated", "tokens"):
        table.add_column(name)
    for row in evaluations:
        temperature = f"{row['sampling']['temperature']:g}" if "sampling" in row else "-"
        average = f"avg@{row['num_samples']}"
        numbers = (average, str(row["num_prompts"]), percent(row["truncated_share"]), f"{row['mean_tokens']:.0f}")
        table.add_row(row["split"], temperature, with_interval(row), *numbers)
    words = "at: temperature; avg@k: mean over k responses to each prompt"
    return Group(table, Text(words, "bright_black"), *_passed(evaluations))


def _passed(evaluations: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    """pass@k of each evaluation for k = 1, 2, 4, ... n, unbiased; nothing where accuracies say all there is."""
    known = [row for row in evaluations if row["rewards"]]
    sizes = pass_sizes(max((max(map(len, row["rewards"].values())) for row in known), default=0))
    if not known or (len(sizes) < 2 and measure_of(known) == ACCURACY):
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black", pad_edge=False)
    table.add_column("held-out")
    for k in sizes:
        table.add_column(f"pass@{k}", justify="right")
    several = {row["split"] for row in known if row["version"] != known[0]["version"]}
    for row in known:
        found = (mean_pass_at_k(row["rewards"].values(), k) for k in sizes)
        at = f", step {row['step']}" if row["split"] in several else ""
        table.add_row(f"{row['split']}{at}", *("-" if one is None else percent(one) for one in found))
    yield Text()
    yield table
    yield Text(f"pass@k: share of prompts solved in k tries; {PASSES}", "bright_black")


def changes(evaluations: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """(split, first row, last row) of every split that was measured at two versions or more."""
    for split in dict.fromkeys(row["split"] for row in evaluations):
        rows = [row for row in evaluations if row["split"] == split]
        if rows[0]["version"] != rows[-1]["version"]:
            yield split, rows[0], rows[-1]


def change_text(first: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    """Paired change in percentage points over the prompts common to both rows, with its 95 % interval."""
    found = change(first, last)
    return "different prompts" if found is None else found.in_points


def over_best_base(evaluations: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """For each split that was measured at several temperatures: the trained model at the training temperature against
    the base model at the temperature where its mean reward is highest. A gain only over the same temperature may
    mean no more than that the model has become more deterministic."""
    for split, first, last in changes(evaluations):
        versions = (row for row in evaluations if row["version"] == first["version"])
        bases = [row for row in versions if row["split"].rpartition("@")[0] == split]
        if bases:
            best = max([first, *bases], key=lambda row: float(row["accuracy"]))
            best, last = over_shared(best, last)
            temperatures = [row["sampling"]["temperature"] for row in (last, best)]
            where = "" if temperatures[0] == temperatures[1] else f" at temperature {temperatures[1]:g}"
            yield (
                f"{split}: {percent(last['accuracy'])} at temperature {temperatures[0]:g}; before training at best "
                f"{percent(best['accuracy'])}{where}: {change_text(best, last)} points"
            )


def _before_and_after(evaluations: Sequence[Mapping[str, Any]]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black", pad_edge=False)
    for name in ("held-out", "before", "after", "change in points"):
        table.add_column(name, overflow="fold")
    moved = {split for split, _, _ in changes(evaluations)}
    shared = [(split, *over_shared(first, last)) for split, first, last in changes(evaluations)]
    for split, first, last in shared:
        table.add_row(split, with_interval(first), with_interval(last), change_text(first, last))
    for row in evaluations:
        if row["split"] not in moved:
            table.add_row(row["split"], with_interval(row), "not evaluated", "")
    measure = measure_of(evaluations)
    caption = f"{measure}, 95 % intervals in brackets, over the prompts common to both evaluations"
    passed = _passed([one for _, *both in shared for one in both]) if measure == MEAN_REWARD else ()
    lines = (Text(line) for line in over_best_base(evaluations))
    return Group(table, *lines, Text(caption, "bright_black"), *passed)


def _sizes_sampled(run: RunDirectory) -> list[int]:
    """Responses in each group that workers sampled for training; a reused group counts once, in its first step."""
    return [num_sampled(result) for _, results in first_results(run.read_groups()) for result in results]


def _checkpoints(run: RunDirectory) -> Iterator[tuple[str, str]]:
    steps = run.checkpoint_steps()
    if not steps:
        yield "checkpoints", "none"
        return
    newest = run.checkpoint_dir(steps[-1])
    yield "checkpoint", str(newest)
    failure = newest / EXPORT_FAILED
    if (exported := newest / "hf").is_dir():
        yield "model", f"{exported} (load it with transformers)"
    elif (exported := newest / "adapter").is_dir():
        yield "model", f"{exported} (load it with PEFT; bapo export --merged {run.path} writes the whole model)"
    elif failure.is_file():
        yield "model", f"not exported: {failure.read_text()}; repeat with bapo export {run.path}"
    else:
        yield "model", f"bapo export {run.path}"
