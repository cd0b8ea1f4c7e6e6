"""`bapo reward test`: check that a reward function gives 1 to the correct answers of a data set, and only to them."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from bapo.cli.arguments import say, waiting
from bapo.cli.buffer.target import make_console, table
from bapo.cli.help import Command, group
from bapo.config.check import read_options
from bapo.config.tree import TaskConfig
from bapo.core.errors import ConfigError
from bapo.core.reward_details import as_columns, mean_of_groups, shown_details
from bapo.core.types import Prompt
from bapo.tasks.base import TaskContext
from bapo.tasks.data_files import is_file
from bapo.tasks.dataset import NAME, DatasetOptions
from bapo.tasks.grading.pool import (
    GraderPool,
    UngradedError,
    VerifierKilledError,
    VerifierMemoryError,
    VerifierRaisedError,
    VerifierTimeoutError,
)
from bapo.tasks.grading.trial import BUSY, PARTLY, RIGHT, WRONG, Trial, read_prompts, try_reward
from bapo.tasks.judge_store import JudgeStore
from bapo.tasks.judging import read_rubric
from bapo.tasks.rewards import grades_groups
from bapo.tasks.right_answers import gold_text

SHOWN = 5
"""Maximum number of different problems that are printed; `--json` has all, row by row."""

PARTIAL_CREDIT = ", with partial credit: a group trains when its rewards differ"
NEVER_HARD = (
    "note: each other answer got partial credit; if all incorrect ones do, no prompt has a mean reward of 0, so "
    "algorithm.c1 must be at least that credit for B_bad to fill"
)

app = group("Test a reward function on your data before you train with it.")


@app.command("test", cls=Command)
def try_out(
    reward: Annotated[str, typer.Argument(metavar="REWARD", help="Like task.reward: file.py:f, trl:..., a list.")],
    data: Annotated[
        str, typer.Option("--data", metavar="FILE", help=".parquet, .jsonl, or a Hub id owner/name:split.")
    ],
    gold_format: Annotated[str, typer.Option(help="Format of a correct response.")] = "{answer}",
    prompt_column: Annotated[
        str | None, typer.Option(help="Dots step into nested columns; default: recognized.")
    ] = None,
    answer_column: Annotated[str | None, typer.Option(help="Default: recognized by the layout.")] = None,
    columns: Annotated[str, typer.Option(help="Further columns that prompt.answer has: level,nums.")] = "",
    reward_range: Annotated[
        tuple[float, float], typer.Option(metavar="LOW HIGH", help="Range of the reward: -1 1 for verl's DAPO.")
    ] = (0.0, 1.0),
    rows: Annotated[int, typer.Option(min=1, help="Rows to test, from the start of the file.")] = 1000,
    timeout_s: Annotated[
        float, typer.Option(min=0.001, help="Timeout per response, like task.grading_timeout_s.")
    ] = 10.0,
    min_accuracy: Annotated[float, typer.Option(min=0.0, max=1.0, help="Exit code 1 below this accuracy.")] = 0.99,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Test a reward function: it must return 1 for the correct answer of each row, and not for other answers.

    Exit code 0: suitable for training; 1: unsuitable; 2: reward or data cannot be loaded.

    Examples:

      bapo reward test my_rewards.py:exact --data train.parquet
      bapo reward test verl:score.py:compute_score --data train.parquet \\
          --gold-format "#### {answer}"
      bapo reward test '["r.py:form", { function = "r.py:exact", weight = 4 }]' --data train.jsonl
    """
    if "{answer}" not in gold_format:
        raise ConfigError(f"--gold-format {gold_format!r} must contain {{answer}}")
    extra = [name for name in columns.split(",") if name]
    table = {"path": data, "prompt_column": prompt_column, "answer_column": answer_column, "extra_columns": extra}
    options, trial = read_options(DatasetOptions, table, ("task", "options")), Trial()
    settings = {"reward": reward, "reward_range": reward_range, "grading_timeout_s": timeout_s}
    task = read_options(TaskConfig, {"name": NAME, "options": {"path": data}, **settings}, ("task",))
    with waiting(f"loading {data} from the Hugging Face Hub") if not is_file(data) else nullcontext():
        prompts = read_prompts(options, TaskContext(rewards=task.reward_functions), rows, trial)
    if not trial.num_rows and not prompts:
        raise ConfigError(f"dataset {data} has no rows")
    if not prompts:
        raise ConfigError(f"no row of {data} can be used: {': '.join(trial.problems[0])}")
    with closing(GraderPool(task, num_children=1)) as graders:
        copies = 2 if any(map(grades_groups, task.reward_functions)) else 1
        progress = try_reward(graders, prompts, lambda prompt: _gold(prompt, gold_format), trial, copies=copies)
        for _ in track(progress, "grading", total=len(prompts), console=Console(stderr=True), transient=True):
            pass
    grades_others = trial.others_failed <= (1.0 - min_accuracy) * trial.others_tried
    is_fit = trial.accuracy >= min_accuracy and grades_others and not _says_yes_to_all(trial)
    if as_json:
        typer.echo(json.dumps(_as_json(trial, is_fit=is_fit), indent=2))
    else:
        _tell(trial, is_fit=is_fit)
    raise typer.Exit(0 if is_fit else 1)


@app.command("judged", cls=Command)
def judged(
    rubric: Annotated[str, typer.Argument(metavar="RUBRIC.toml", help="Of a `judge:` reward.")],
) -> None:
    """Print the calls and tokens of a judge: all that its store has, by model and outcome.

    Examples:

      bapo reward judged rubric.toml
    """
    path = Path(read_rubric(rubric).store).expanduser()
    spent = JudgeStore(path).spent() if path.exists() else []
    rows = [
        {
            "model": one.model,
            "outcome": one.outcome,
            "calls": one.calls,
            "prompt tokens": one.prompt_tokens,
            "completion tokens": one.completion_tokens,
            "seconds each": round(one.seconds / one.calls, 2),
        }
        for one in spent
    ]
    shown = table(list(rows[0]), rows, ids=("model", "outcome")) if rows else f"no call in {path}"
    make_console().print(shown)


def _gold(prompt: Prompt, gold_format: str) -> str:
    return gold_format.replace("{answer}", gold_text(prompt.answer["answer"]))


def _says_yes_to_all(trial: Trial) -> bool:
    return trial.others_tried > 0 and trial.others_right == trial.others_tried


def _as_json(trial: Trial, *, is_fit: bool) -> dict[str, Any]:
    return {
        "fit": is_fit,
        "rows": trial.num_rows,
        "accuracy": trial.accuracy,
        "gold": trial.results,
        "unreadable": trial.unreadable,
        "others_tried": trial.others_tried,
        "others_right": trial.others_right,
        "others_partly": trial.others_partly,
        "others_failed": trial.others_failed,
        "gold_details": as_columns(mean_of_groups(trial.gold_details)),
        "others_details": as_columns(mean_of_groups(trial.others_details)),
        "mean_s": trial.total_s / max(1, sum(trial.results.values())),
        "slowest_s": trial.slowest_s,
        "slowest": trial.slowest,
        "problems": [f"{where}: {what}" for where, what in trial.problems],
    }


def _tell(trial: Trial, *, is_fit: bool) -> None:
    graded = sum(trial.results.values())
    say(f"gold answers with reward 1   {trial.results.get(RIGHT, 0)} of {trial.num_rows} ({trial.accuracy:.1%})")
    for result, num in sorted(trial.results.items()):
        if result != RIGHT:
            say(f"  {result:<23} {num}")
    if trial.unreadable:
        say(f"  {'unreadable rows':<23} {trial.unreadable}")
    failed = f"; {trial.others_failed} failed" if trial.others_failed else ""
    say(f"other answers rewarded 1  {trial.others_right} of {trial.others_tried}{failed}")
    if trial.others_partly:
        say(f"  with partial credit     {trial.others_partly}")
    for whose, details in (("gold", trial.gold_details), ("other", trial.others_details)):
        if shown := shown_details(as_columns(mean_of_groups(details))):
            say(f"means of {whose:<5} answers     {shown}")
    mean_s = trial.total_s / max(1, graded)
    say(f"seconds per response      {mean_s:.3f}, slowest {trial.slowest_s:.3f} ({trial.slowest})")
    rows: dict[str, list[str]] = {}
    for where, what in trial.problems:
        rows.setdefault(what, []).append(where)
    for what, places in list(rows.items())[:SHOWN]:
        say(f"- {len(places)} rows: {what}; first: {places[0]}" if len(places) > 1 else f"- {places[0]}: {what}")
    if len(rows) > SHOWN:
        say(f"- and {len(rows) - SHOWN} other problems: --json shows all")
    _judge(trial, is_fit=is_fit)


def _judge(trial: Trial, *, is_fit: bool) -> None:
    if is_fit:
        say("suitable for training" + (PARTIAL_CREDIT if trial.others_partly else ""))
        if trial.others_partly == trial.others_tried > 0:
            say(NEVER_HARD)
    else:
        say(f"unsuitable: {_why(trial)}")


def _why(trial: Trial) -> str:
    """The most frequent reason why a reward is not fit, and what to do about it."""
    if _says_yes_to_all(trial):
        return "it also rewards incorrect answers, so a model cannot learn from it"
    counts = Counter({result: num for result, num in trial.results.items() if result != RIGHT})
    counts.update(trial.others_troubles)
    if trial.unreadable:
        counts[UNREADABLE] = trial.unreadable
    reason, num = counts.most_common(1)[0]
    told = f"{num} of {trial.num_rows + (trial.others_tried if reason != UNREADABLE else 0)} gradings: "
    if reason == UNREADABLE:
        told = f"{num} of {trial.num_rows} rows: "
    elif reason in trial.results and reason not in trial.others_troubles:
        told = f"{num} of {trial.num_rows} correct answers: "
    return told + (_of_error(trial) if reason == VerifierRaisedError.reason else ADVICE[reason])


def _of_error(trial: Trial) -> str:
    """What to do about a reward that raises or returns no number, by the most frequent of its errors."""
    for what, _ in Counter(what for _, what in trial.problems).most_common():
        for sign, advice in ERRORS:
            if sign in what:
                return advice
    return "it raised; return 0 for a response that is wrong or that it cannot read"


UNREADABLE = "unreadable"
ADVICE = {
    UNREADABLE: "no prompt or no answer; fill or remove them, or set --prompt-column and --answer-column",
    UngradedError.reason: "it returned None (ungraded); return 1 for a correct response, 0 for an incorrect one",
    VerifierTimeoutError.reason: "it took longer than --timeout-s (task.grading_timeout_s)",
    VerifierMemoryError.reason: "it took more memory than task.grading_memory_mb",
    VerifierKilledError.reason: "it ended its process; it must return a number",
    BUSY: "the verifier was kept busy; set a longer --timeout-s (task.grading_timeout_s)",
    PARTLY: "less than 1; a correct response must get 1: set --gold-format to its format, or --reward-range",
    WRONG: "reward 0; a correct response must get 1: set --gold-format to its format",
}
"""Result of a grading -> what is wrong and what to do."""
ERRORS = (
    ("expected one reward for each", "it must return one number for each completion, in a list"),
    ("it requires", "it reads a column that is missing in some rows; fill it in, or name it with --columns"),
    ("for a column", "it reads a column that is missing in some rows; fill it in, or name it with --columns"),
    ("return None for a response that cannot", "it returned NaN or infinity; return a number in the range"),
    ("task.reward_range", "it returned a number outside of the range; set --reward-range (task.reward_range)"),
    ("which is not a number", "it returned no number; return one number for each response"),
)
"""Part of a verifier's error -> what is wrong and what to do."""
