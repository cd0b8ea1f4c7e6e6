"""`bapo init`: a commented run.toml for your own model, data and reward."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from bapo.cli.arguments import say, waiting
from bapo.config.check import read_options
from bapo.config.load import load_config
from bapo.config.tree import TaskConfig
from bapo.core.errors import ConfigError, did_you_mean
from bapo.runtime.machine import num_gpu_files
from bapo.runtime.model_files import context_length, folder_of, is_hub_id, missing_parts, num_parameters
from bapo.runtime.run_directory.files import replace_file, storing
from bapo.tasks.base import TaskContext
from bapo.tasks.data_files import Row, first_with_values, is_file, read_rows
from bapo.tasks.dataset import ANSWER_COLUMNS, INSTRUCTION, NAME, PROMPT_COLUMNS, require_whole
from bapo.tasks.grading.pool import GraderPool
from bapo.tasks.grading.trial import try_first
from bapo.tasks.registry import load_task

NUM_RESPONSES = 256
"""Per step, unless the data has too few prompts."""
MAX_PROMPTS = 64
"""Rows that are read."""
MORE_ANSWER_COLUMNS = ("target", "label", "ground_truth", "response", "output")
REWARD_CALLS = {"trl": "called with all responses to a prompt"}
"""Prefix of a reward -> when it is called; the others: for each response."""
REWARD_VALUES = "1: right, 0: wrong, between: partial credit"
LEARNING_RATES = ((10_000_000, "1e-4"), (400_000_000, "1e-5"))
"""(Parameters, rate for fewer than these). Larger models: LARGE_RATE.

The best rate decreases with the size of a model. 1e-6 is the paper's, for 1.5 B parameters and more, and the default of
TRL and verl; every study with the shipped models of 0.6 to 1 M has 1e-4 (deploy/configs). What lies between is
interpolated, not measured.
"""
LARGE_RATE = "1e-6"
CHAT_NAMES = ("instruct", "chat", "-it")
"""Substrings in the names of models with a chat template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Properties detected from the first rows of the training data."""

    prompt_column: str = "prompt"
    answer_column: str | None = None
    """None: detected from the layout."""
    is_text: bool = True
    """Whether prompts are text rather than lists of messages."""
    num_rows: int | None = None
    """Number of rows, up to MAX_PROMPTS; None: not read."""


def init(
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="Folder in Hugging Face format, or a Hub id owner/name.")
    ],
    data: Annotated[
        str,
        typer.Option("--data", metavar="FILE", help="Training data: .jsonl, .parquet, or a Hub id owner/name:split."),
    ],
    reward: Annotated[
        str | None,
        typer.Option("--reward", metavar="REWARD", help="file.py:function; default: exact match with the answer."),
    ] = None,
    held_out: Annotated[
        str | None, typer.Option("--held-out", metavar="FILE", help="Evaluation data, like --data.")
    ] = None,
    preset: Annotated[str, typer.Option("--preset", metavar="NAME", help="The method, such as bapo-reuse.")] = "grpo",
    prompt_column: Annotated[str | None, typer.Option(help="Column of the prompts; default: detected.")] = None,
    answer_column: Annotated[str | None, typer.Option(help="Column of the answers; default: detected.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="File to write.")] = Path("run.toml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")] = False,
) -> None:
    """Write a commented run.toml for your model, data and reward.

    Checks that model, data and reward can be loaded, grades the correct answer of the first row, and sets the dozen
    settings that most runs change; the preset defines the rest.

    Examples:

      bapo init --model Qwen/Qwen2.5-0.5B-Instruct --data train.jsonl \\
          --reward rewards.py:score --held-out test.jsonl
      bapo train run.toml --dry-run
      bapo train run.toml
    """
    if output.exists() and not force:
        raise ConfigError(f"{output} exists; overwrite it with --force, or choose another file with --output FILE")
    _check_model(model)
    found = inspect_data(data, prompt_column, answer_column)
    if held_out is not None:
        inspect_data(held_out, prompt_column, answer_column)
    trouble = ""
    if reward is not None:
        trouble = _reward_trouble(reward, data, found)
    text = run_toml(model, data, reward, held_out, preset, found, output)
    with storing(output):
        replace_file(output, text.encode())
    try:
        load_config([output], [])
    except ConfigError:
        output.unlink()
        raise
    typer.echo(
        f"wrote {output}\n  check  bapo train {output} --dry-run\n"
        + (f"         bapo reward test {reward} --data {data}{_columns(found)}\n" if reward else "")
        + f"  start  bapo train {output}"
    )
    if trouble:
        say(f"warning: {trouble}")


def inspect_data(source: str, prompt_column: str | None, answer_column: str | None) -> Data:
    """Read the first rows of the training data. Data sets on the Hub are not downloaded.

    Raises: ConfigError for a missing or malformed file, or a missing column.
    """
    if not is_file(source):
        return Data(prompt_column=prompt_column or "prompt", answer_column=answer_column)
    rows = list(islice(read_rows(source), MAX_PROMPTS))
    if not rows:
        raise ConfigError(f"dataset {source} has no rows")
    known = tuple(ANSWER_COLUMNS)
    prompts = [prompt_column] if prompt_column else PROMPT_COLUMNS
    answers = [answer_column] if answer_column else (*known, *MORE_ANSWER_COLUMNS)
    prompt, answer = first_with_values(source, prompts, answers)
    if prompt is None:
        raise _no_column(rows[0], prompt_column, PROMPT_COLUMNS, "prompt")
    if answer is None:
        raise _no_column(rows[0], answer_column, answers, "answer")
    if prompt == INSTRUCTION and prompt_column is None:  # the run gets it by name, and takes a named column as it is
        for row in read_rows(source):
            require_whole(row, prompt)
    return Data(
        prompt_column=prompt,
        answer_column=None if answer in known and answer_column is None else answer,
        is_text=all(isinstance(row.get(prompt), str) for row in rows if row.has(prompt)),
        num_rows=len(rows),
    )


def _no_column(row: Row, given: str | None, usual: Sequence[str], what: str) -> ConfigError:
    """Neither the given column nor a common one has a value in any row."""
    hint = did_you_mean(given, row.values) if given else ""
    wanted = f"no column {given!r}{hint}" if given else f"no {what} column found (tried {', '.join(usual)})"
    return ConfigError(f"{row.where}: {wanted}; set it with --{what}-column. The row has {', '.join(row.values)}")


def _check_model(model: str) -> None:
    if Path(model).is_dir():
        if missing := missing_parts(Path(model)):
            raise ConfigError(
                f"--model: {model} has no {' and no '.join(missing)}; use a folder in Hugging Face format"
            )
    elif not is_hub_id(model):
        raise ConfigError(f"--model: folder {model} not found, and it is not a Hugging Face id like owner/name")


def _reward_trouble(reward: str, data: str, found: Data) -> str:
    """What the reward does with the correct answer of the first row, unless it gives 1; graded as in a run.

    Raises: ConfigError when it cannot be loaded, or the data cannot be read.
    """
    task = read_options(TaskConfig, {"reward": reward}, ("task",))
    with waiting(f"loading {reward}"), closing(GraderPool(task, num_children=1)) as graders:
        if not is_file(data):
            return ""  # not downloaded here
        options = {"path": data, "prompt_column": found.prompt_column, "answer_column": found.answer_column}
        return try_first(graders, load_task(NAME, options, TaskContext(rewards=task.reward_functions)))[1]


def run_toml(
    model: str, data: str, reward: str | None, held_out: str | None, preset: str, found: Data, output: Path
) -> str:
    """Content of the file: about 25 lines, with a comment on each setting."""
    method = load_config([preset], [])
    group_size = method.algorithm.group_size
    batch_size = min(NUM_RESPONSES // group_size, found.num_rows or MAX_PROMPTS)
    updates = max(1, method.algorithm.batch_size // method.groups_per_update)
    num_gpus = num_gpu_files()
    prompt_tokens, response_tokens = _lengths(model)
    rows = [
        f"# Check: bapo train {output} --dry-run    Start: bapo train {output}",
        f"# All settings: bapo config show {output}; reference: docs/configuration.md",
        "",
        (f"preset = {_toml(preset)}", "the method; bapo config presets lists all"),
        "",
        "[run]",
        ('name = "auto"', f"{output.stem}-001, {output.stem}-002, ... below outputs/"),
        ("num_steps = 100", "learner steps"),
        "",
        "[model]",
        f"path = {_toml(model)}",
        (f"dtype = {_toml('bfloat16' if num_gpus else 'float32')}", "bfloat16 on GPUs, float32 on CPUs"),
        "",
        "[task]",
        'name = "dataset"',
        f"options = {{ {', '.join(_task_options(model, data, held_out, found))} }}",
        *(
            [
                f"# {REWARD_CALLS.get(reward.partition(':')[0], 'called with each response')}; {REWARD_VALUES}",
                f"reward = {_toml(reward)}",
            ]
            if reward
            else [f'# reward = "rewards.py:score"       # instead of the exact answer; {REWARD_VALUES}']
        ),
        "",
        "[algorithm]",
        (f"batch_size = {batch_size}", "prompts per step"),
        (f"group_size = {group_size}", "responses per prompt"),
        "",
        "[rollout]",
        ("num_workers = 1", "inference engines, each on a GPU or core of its own"),
        (f"max_prompt_tokens = {prompt_tokens}", "longer prompts are rejected"),
        (f"max_response_tokens = {response_tokens}", "longer responses are truncated"),
        *([("engine_options = { gpu_memory_utilization = 0.4 }", "shared with the learner")] if num_gpus == 1 else []),
        "",
        "[learner]",
        _learning_rate(model),
        (f"minibatch_size = {max(1, batch_size // updates)}", "prompts per update"),
        "",
        "[checkpoint]",
        ("every = 10", "steps between checkpoints: what a stopped run repeats at most"),
        "",
        "[evaluation]",
        (
            "every = 10",
            "training steps between evaluations, at least"
            if held_out
            else "requires held_out data: see [task] options",
        ),
    ]
    return "\n".join(row if isinstance(row, str) else f"{row[0]:<33} # {row[1]}" for row in rows) + "\n"


def _learning_rate(model: str) -> tuple[str, str]:
    """The line of the rate, and why it has this value."""
    folder = folder_of(model)
    parameters = (num_parameters(folder) if folder else None) or _size_in_name(model)
    if not parameters:
        return f"lr = {LARGE_RATE}", "for 0.5 B parameters and more; 1e-5 to 1e-4 for smaller models"
    rate = next((rate for bound, rate in LEARNING_RATES if parameters < bound), LARGE_RATE)
    return f"lr = {rate}", f"fits {_millions(parameters)} parameters; the larger a model, the lower"


def _size_in_name(model: str) -> int | None:
    """Parameters that a model's name states: Qwen2.5-1.5B-Instruct has 1.5e9, SmolLM2-135M 1.35e8."""
    match = re.search(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([BM])(?![A-Za-z0-9])", Path(model).name, re.IGNORECASE)
    return int(float(match[1]) * {"B": 1e9, "M": 1e6}[match[2].upper()]) if match else None


def _millions(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


def _lengths(model: str) -> tuple[int, int]:
    """Prompt and response tokens: 512 and 1024, or a third and two thirds of a shorter context."""
    context = context_length(Path(model))
    return (512, 1024) if context is None or context >= 1536 else (context // 3, context - context // 3)


def _task_options(model: str, data: str, held_out: str | None, found: Data) -> Iterator[str]:
    yield f"path = {_toml(data)}"
    if held_out:
        yield f"held_out = {{ test = {_toml(held_out)} }}"
    if found.prompt_column != "prompt":
        yield f"prompt_column = {_toml(found.prompt_column)}"
    if found.answer_column:
        yield f"answer_column = {_toml(found.answer_column)}"
    if found.is_text and _has_chat_template(model):
        yield "chat = true"


def _has_chat_template(model: str) -> bool:
    folder = Path(model)
    if not folder.is_dir():
        return any(part in model.lower() for part in CHAT_NAMES)
    if (folder / "chat_template.jinja").is_file():
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and '"chat_template"' in settings.read_text(encoding="utf-8", errors="replace")


def _columns(found: Data) -> str:
    """Options of `bapo reward test` for columns that it would not detect."""
    prompt = f" --prompt-column {found.prompt_column}" if found.prompt_column != "prompt" else ""
    answer = f" --answer-column {found.answer_column}" if found.answer_column else ""
    return prompt + answer


def _toml(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
