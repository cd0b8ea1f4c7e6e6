"""`bapo simulate`: the batches of a recorded run with different batch settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from bapo.algorithms.composers.registry import load_composer
from bapo.cli.arguments import Run, open_run, say
from bapo.cli.buffer.target import AsJson, make_console, print_json
from bapo.cli.recorded.transcript import recorded_responses, responses_as_maps, transcript
from bapo.config.load import diff, load_resolved
from bapo.config.tree import Config
from bapo.core.text import ORIGIN_COLORS, plain
from bapo.core.types import Origin
from bapo.runtime.progress import progress
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.run_directory.recording import RecordedStep, Recording, read_recording
from bapo.runtime.run_directory.responses import TokenRow
from bapo.whatif.explanation import explain as explain_prompt
from bapo.whatif.explanation import find_prompt
from bapo.whatif.simulation import Reproduction, SimulatedStep, Source, as_recorded, compare, what_if

NOT_ANSWERED = (
    "These batches are formed from the recorded groups. They do not show what the model would have learned: "
    "different batches lead to different weights and responses."
)


WITHIN = 10


@dataclass(frozen=True, kw_only=True)
class Result:
    recording: Recording
    config: Config
    changes: list[str]
    recorded: list[SimulatedStep]
    simulated: list[SimulatedStep]
    reproduction: Reproduction

    @property
    def answers(self) -> Counter[Source]:
        """Re-evaluations of the run, by the source of their outcome."""
        return sum((step.answers for step in self.simulated), Counter())


def simulate(
    context: typer.Context,
    run: Run,
    within: Annotated[
        int,
        typer.Option("--within", min=0, help="Replace a missing re-evaluation by a group up to N steps away."),
    ] = WITHIN,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Maximum number of table rows.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Rebuild the batches of a run from its recorded groups with different settings, in seconds.

    Without settings it verifies that the recorded batches are reproduced. Settings are --algorithm.KEY VALUE and
    --cadence.reevaluation_interval VALUE. It does not predict what the model would have learned.

    Examples:

      bapo simulate outputs/demo-001
      bapo simulate outputs/demo-001 --algorithm.c1 0.25
      bapo simulate outputs/demo-001 --cadence.reevaluation_interval 10
    """
    result = simulated(open_run(run), context.args, within=within)
    if as_json:
        print_json(_as_map(result))
        return
    console = make_console()
    table = comparison_table(
        result.recorded,
        result.simulated,
        batch_size=result.config.algorithm.batch_size,
        changed=bool(result.changes),
        has_window="c2" in load_composer(result.config.algorithm).decides_by,
        num_rows=rows,
    )
    console.print("\n".join(map(plain, _head(result))), markup=False)
    console.print()
    console.print(table)
    console.print()
    console.print("\n".join([*_totals(result), NOT_ANSWERED]))


def simulated(run: RunDirectory, overrides: Sequence[str], *, within: int) -> Result:
    """Simulate the run with the recorded and the new settings. Raises: ConfigError."""
    config = load_resolved(run.config_path, overrides)
    with progress(f"simulating {run.name}"):
        recording = read_recording(run)
        recorded = as_recorded(recording)
        return Result(
            recording=recording,
            config=config,
            changes=diff(recording.config, config),
            recorded=recorded,
            simulated=what_if(recording, config, within=within),
            reproduction=compare(recording, recorded),
        )


def _head(result: Result) -> Iterator[str]:
    yield f"run {result.recording.name}: {result.reproduction.sentence}"
    if not result.reproduction.exact:
        yield (
            "the records are incomplete (entries may have been dropped from the buffer manually), so the "
            "simulation is not exact"
        )
    yield from (f"with {change}" for change in result.changes)


def _totals(result: Result) -> Iterator[str]:
    size = result.config.algorithm.batch_size * len(result.simulated)
    parts_of = [("recorded", result.recorded), ("simulated", result.simulated)]
    for name, steps in parts_of if result.changes else parts_of[:1]:
        sums = {origin: sum(len(step.batch[origin]) for step in steps) for origin in Origin}
        parts = ", ".join(f"{origin.value.upper()} {count}" for origin, count in sums.items())
        total = sum(sums.values())
        yield f"{name}: {total} groups trained in {len(steps)} steps ({parts}), {100 * total / size:.1f} % of B"
    if result.changes:
        answers = result.answers
        yield (
            f"re-evaluations: {answers[Source.RECORDED]} as recorded, {answers[Source.BORROWED]} from the prompt's "
            f"nearest recorded group, {answers[Source.UNKNOWN]} unknown (their prompts stayed in B_bad)"
        )


def _as_map(result: Result) -> dict[str, Any]:
    reproduction = result.reproduction
    return {
        "run": result.recording.name,
        "changes": result.changes,
        "reproduced_steps": reproduction.num_same,
        "num_steps": reproduction.num_steps,
        "first_difference": reproduction.first,
        "reevaluations": {source.value: result.answers[source] for source in Source},
        "answers_what_the_model_would_learn": False,
        "steps": [
            {"step": then.step, "recorded": _step_map(then), "simulated": _step_map(now)}
            for then, now in zip(result.recorded, result.simulated, strict=True)
        ],
    }


def _step_map(step: SimulatedStep) -> dict[str, Any]:
    decision = step.decision
    return {
        **{origin.value: names for origin, names in step.batch.items()},
        "r_tot": decision.r_tot,
        **decision.reported,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    sizes: dict[Origin, float]
    bad: float
    high: float
    r_tot: float
    c2: float
    c3: float

    @property
    def total(self) -> float:
        return sum(self.sizes.values())


def mean_of(steps: Sequence[SimulatedStep]) -> Mean:
    def mean(values: Iterator[float]) -> float:
        return sum(values) / len(steps)

    return Mean(
        sizes={origin: mean(float(len(step.batch[origin])) for step in steps) for origin in Origin},
        bad=mean(float(len(step.decision.bad)) for step in steps),
        high=mean(float(len(step.decision.high)) for step in steps),
        r_tot=mean(step.decision.r_tot for step in steps),
        c2=mean(step.decision.facts.get("c2", 0.0) for step in steps),
        c3=mean(step.decision.facts.get("c3", 0.0) for step in steps),
    )


def comparison_table(
    recorded: Sequence[SimulatedStep],
    simulated: Sequence[SimulatedStep],
    *,
    batch_size: int,
    changed: bool,
    num_rows: int,
    has_window: bool = True,
) -> Table:
    """One row per step, or per range of steps if there are more than `num_rows`; a->b: recorded, simulated."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bright_black")
    table.add_column("step", no_wrap=True)
    for origin in Origin:
        table.add_column(origin.value.upper(), justify="right", style=ORIGIN_COLORS[origin.value], no_wrap=True)
    window = ("c2-c3",) if has_window else ()
    for name in (f"of {batch_size}", "B_bad", "B_high", "r_tot", *window):
        table.add_column(name, justify="right", no_wrap=True)
    if changed:
        table.add_column("unknown", justify="right", no_wrap=True)
    size = -(-len(simulated) // num_rows)
    for start in range(0, len(simulated), size):
        then, now = recorded[start : start + size], simulated[start : start + size]
        table.add_row(*_cells(then, now, changed=changed, has_window=has_window))
    return table


def _cells(
    then: Sequence[SimulatedStep], now: Sequence[SimulatedStep], *, changed: bool, has_window: bool
) -> Iterator[str | Text]:
    old, new = mean_of(then), mean_of(now)
    digits = 1 if len(now) > 1 else 0

    def both(before: float, after: float) -> str:
        left, right = f"{before:.{digits}f}", f"{after:.{digits}f}"
        return right if left == right else f"{left}->{right}"

    yield str(now[0].step) if len(now) == 1 else f"{now[0].step}-{now[-1].step}"
    for origin in Origin:
        yield both(old.sizes[origin], new.sizes[origin])
    yield both(old.total, new.total)
    yield both(old.bad, new.bad)
    yield both(old.high, new.high)
    yield f"{new.r_tot:.2f}"
    if has_window:
        yield f"{new.c2:.2f}-{new.c3:.2f}"
    if changed:
        yield str(sum(step.answers[Source.UNKNOWN] for step in now) or "-")


# `bapo explain`: why a prompt was or was not in a batch.

ALL = "all"


def explain(
    run: Run,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT_ID", help="Id of a prompt or a prefix; all: every prompt.")
    ] = ALL,
    step: Annotated[
        int | None, typer.Argument(metavar="STEP", help="The learner step; default: the latest.", min=1)
    ] = None,
    responses: Annotated[
        bool, typer.Option("--responses", help="Also print the recorded responses; of agents, turn by turn.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Explain why a prompt was or was not in a batch: rewards and reason of its groups, and its tables.

    Examples:

      bapo explain latest
      bapo explain outputs/demo-001 all 17
      bapo explain outputs/demo-001 PROMPT_ID 17
      bapo explain outputs/demo-001 PROMPT_ID 17 --responses
    """
    with progress(f"reading the records of {run}"):
        directory = open_run(run)
        recording = read_recording(directory)
        step = step or recording.steps[-1].step
        recorded = recording.step(step)
        replayed = as_recorded(recording)
    asked_for = list(dict.fromkeys(result.prompt_id for result in recorded.results)) if prompt == ALL else []
    prompt_ids = asked_for or [find_prompt(recording, prompt)]
    found = [explain_prompt(recording, replayed, prompt_id, step) for prompt_id in prompt_ids]
    first = compare(recording, replayed).first
    is_exact = first is None or first[0] > step
    groups = _responses_of(directory, recorded, prompt_ids) if responses else {}
    if as_json:
        maps = [{**asdict(one), "tables_are_exact": is_exact, **_as_json(groups.get(one.prompt_id))} for one in found]
        print_json(maps if prompt == ALL else maps[0])
        return
    for explanation in found:
        say(explanation.sentence)
        _print_responses(groups.get(explanation.prompt_id))
    if first is not None and not is_exact:
        say(
            f"(the replay of the records differs from the run since step {first[0]}: {first[1]}; B_bad, B_high and "
            "candidates are those of the replay)"
        )


def _responses_of(
    run: RunDirectory, recorded: RecordedStep, prompt_ids: Sequence[str]
) -> dict[str, list[list[TokenRow]]]:
    """Prompt id -> recorded responses of its groups in this step."""
    own = {prompt_id: [one for one in recorded.results if one.prompt_id == prompt_id] for prompt_id in prompt_ids}
    return {name: recorded_responses(run.token_files, recorded.step, results) for name, results in own.items()}


def _as_json(groups: Sequence[Sequence[TokenRow]] | None) -> dict[str, Any]:
    return {} if groups is None else {"responses": responses_as_maps(groups)}


def _print_responses(groups: Sequence[Sequence[TokenRow]] | None) -> None:
    console = make_console()
    for rows in groups or ():
        for line in transcript(rows):
            console.print(line, soft_wrap=True)
    if groups == []:
        say("no text of it is recorded in this step: see diagnostics.texts")
