"""`bapo simulate`: the batches of a recorded run under other settings of composition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from bapo.analysis.whatif.explanation import explain as explain_prompt
from bapo.analysis.whatif.explanation import find_prompt
from bapo.analysis.whatif.recording import Recording, read_recording
from bapo.analysis.whatif.simulation import Reproduction, SimulatedStep, Source, as_recorded, compare, what_if
from bapo.cli.arguments import open_run, say
from bapo.cli.buffer.target import AsJson, make_console, print_json
from bapo.config.load import diff, load_resolved
from bapo.config.tree import Config
from bapo.core.text import plain
from bapo.core.types import Origin
from bapo.runtime.run_directory.layout import RunDirectory

NOT_ANSWERED = (
    "This is what the batches would have been, from the groups that were sampled in the recorded run. It does not "
    "answer what the model would have learned: other batches make other weights, and other weights other responses."
)


WITHIN = 10


RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run directory, for example outputs/demo-001, or latest.")
]


Edge = Annotated[
    str | None, typer.Option(metavar="X|LOW,HIGH", help="Edge of the window of B_high: fixed, or a range.")
]


@dataclass(frozen=True, kw_only=True)
class Result:
    """A simulation and what it is compared with."""

    recording: Recording
    config: Config
    changes: list[str]
    recorded: list[SimulatedStep]
    simulated: list[SimulatedStep]
    reproduction: Reproduction

    @property
    def answers(self) -> Counter[Source]:
        """Re-evaluations of the whole run, by where their outcome comes from."""
        return sum((step.answers for step in self.simulated), Counter())


def simulate(
    context: typer.Context,
    run: RunArgument,
    c1: Annotated[float | None, typer.Option("--c1", help="Hard threshold: mu <= c1 enters B_bad.")] = None,
    c2: Edge = None,
    c3: Edge = None,
    m: Annotated[int | None, typer.Option("--m", help="Ask B_bad again every m steps (a multiple of v).")] = None,
    buffer: Annotated[int | None, typer.Option("--buffer", help="Most prompts in B_bad.")] = None,
    filter_: Annotated[
        str | None, typer.Option("--filter", help="Online filter: range, gaussian, gaussian_quota, uniform, none.")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option("--schedule", help="How c2 and c3 move: eq8, inverted, official, fixed.")
    ] = None,
    within: Annotated[
        int, typer.Option("--within", min=0, help="Steps from which a group may stand in for a missing re-evaluation.")
    ] = WITHIN,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Most rows of the table.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Replay a run's recorded groups through batch construction, with other settings, in seconds.

    Without settings it checks that the replay gives the recorded batches. Every other key of the section algorithm can
    be given as --algorithm.KEY VALUE. It says nothing of what the model would have learned.

    Example:  bapo simulate outputs/demo-001
              bapo simulate outputs/demo-001 --c1 0.25 --m 10 --filter gaussian
              bapo simulate outputs/demo-001 --algorithm.use_x3 false
    """
    named = {
        "algorithm.c1": c1,
        "algorithm.c2_range": _range(c2),
        "algorithm.c3_range": _range(c3),
        "cadence.m": m,
        "algorithm.bad_capacity": buffer,
        "algorithm.online_filter": filter_,
        "algorithm.threshold_schedule": schedule,
    }
    tokens = [token for key, value in named.items() if value is not None for token in (f"--{key}", str(value))]
    result = simulated(open_run(run), [*tokens, *context.args], within=within)
    if as_json:
        print_json(_as_map(result))
        return
    console = make_console()
    table = comparison_table(
        result.recorded,
        result.simulated,
        batch_size=result.config.algorithm.batch_size,
        changed=bool(result.changes),
        num_rows=rows,
        width=console.width,
    )
    console.print("\n".join(map(plain, _head(result))), markup=False)
    console.print()
    console.print(table)
    console.print()
    console.print("\n".join([*_totals(result), NOT_ANSWERED]))


def simulated(run: RunDirectory, overrides: Sequence[str], *, within: int) -> Result:
    """The run as it was and as it would have been. Raises: ConfigError."""
    recording = read_recording(run)
    config = load_resolved(run.config_path, overrides)
    recorded = as_recorded(recording)
    return Result(
        recording=recording,
        config=config,
        changes=diff(recording.config, config),
        recorded=recorded,
        simulated=what_if(recording, config, within=within),
        reproduction=compare(recording, recorded),
    )


def _range(text: str | None) -> str | None:
    """`0.25` -> [0.25,0.25]; `0.125,0.5` -> [0.125,0.5]."""
    if text is None:
        return None
    return f"[{text}]" if "," in text else f"[{text},{text}]"


def _head(result: Result) -> Iterator[str]:
    yield f"run {result.recording.name}: {result.reproduction.sentence}"
    if not result.reproduction.exact:
        yield (
            "its records do not tell the whole state (somebody may have dropped entries of the buffer by hand), so a "
            "simulation is not exact either"
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
        "c2": decision.c2,
        "c3": decision.c3,
        "num_bad": len(decision.bad),
        "num_high": len(decision.high),
    }


# The table of `bapo simulate`: recorded against simulated batches, in at most so many rows.
#
# At 80 columns the numbers fit; a wider terminal also shows each batch as a bar of X1, X2, X3 against B.

WIDE = 140
"""From this width on there is room for the bars."""
BAR_CHARS = 24
COLOURS = {Origin.X1: "blue", Origin.X2: "dark_orange", Origin.X3: "green"}
BLOCKS = {Origin.X1: "█", Origin.X2: "▓", Origin.X3: "▒"}
"""Different without colours too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """Means over a range of steps."""

    sizes: dict[Origin, float]
    bad: float
    high: float
    r_tot: float
    c2: float
    c3: float

    @property
    def total(self) -> float:
        """Groups in the batch."""
        return sum(self.sizes.values())


def mean_of(steps: Sequence[SimulatedStep]) -> Mean:
    """Means over these steps, at least one."""

    def mean(values: Iterator[float]) -> float:
        return sum(values) / len(steps)

    return Mean(
        sizes={origin: mean(float(len(step.batch[origin])) for step in steps) for origin in Origin},
        bad=mean(float(len(step.decision.bad)) for step in steps),
        high=mean(float(len(step.decision.high)) for step in steps),
        r_tot=mean(step.decision.r_tot for step in steps),
        c2=mean(step.decision.c2 for step in steps),
        c3=mean(step.decision.c3 for step in steps),
    )


def comparison_table(
    recorded: Sequence[SimulatedStep],
    simulated: Sequence[SimulatedStep],
    *,
    batch_size: int,
    changed: bool,
    num_rows: int,
    width: int,
) -> Table:
    """One row per step, or per range of steps where there are more than `num_rows`; a->b: recorded, simulated."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bright_black")
    table.add_column("step", no_wrap=True)
    for origin in Origin:
        table.add_column(origin.value.upper(), justify="right", style=COLOURS[origin], no_wrap=True)
    for name in (f"of {batch_size}", "B_bad", "B_high", "r_tot", "c2-c3"):
        table.add_column(name, justify="right", no_wrap=True)
    bars = ["recorded", "simulated"] if changed else ["batch"]
    if width >= WIDE:
        key = " ".join(f"{origin.value.upper()} {BLOCKS[origin]}" for origin in Origin)
        for name in bars:
            table.add_column(f"{name}: {key}", no_wrap=True)
    if changed:
        table.add_column("unknown", justify="right", no_wrap=True)
    size = -(-len(simulated) // num_rows)
    for start in range(0, len(simulated), size):
        then, now = recorded[start : start + size], simulated[start : start + size]
        table.add_row(*_cells(then, now, batch_size, changed=changed, wide=width >= WIDE))
    return table


def _cells(
    then: Sequence[SimulatedStep], now: Sequence[SimulatedStep], batch_size: int, *, changed: bool, wide: bool
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
    yield f"{new.c2:.2f}-{new.c3:.2f}"
    if wide:
        yield from (_bar(mean, batch_size) for mean in ([old, new] if changed else [new]))
    if changed:
        yield str(sum(step.answers[Source.UNKNOWN] for step in now) or "-")


def _bar(mean: Mean, batch_size: int) -> Text:
    text = Text(no_wrap=True)
    drawn, total = 0, 0.0
    for origin in Origin:
        total += mean.sizes[origin]
        # Rounding the sums, not the parts, keeps the bar's length right.
        end = round(min(total, batch_size) * BAR_CHARS / batch_size)
        text.append(BLOCKS[origin] * (end - drawn), COLOURS[origin])
        drawn = end
    return text.append("·" * (BAR_CHARS - drawn), "bright_black")


# `bapo explain`: why a prompt was or was not in a batch.

ALL = "all"


def explain(
    run: RunArgument,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT_ID", help="Id of a prompt or its beginning; all: of a step.")
    ],
    step: Annotated[int, typer.Argument(metavar="STEP", help="The learner step whose batch is meant.", min=1)],
    as_json: AsJson = False,
) -> None:
    """Say in one sentence, with the inequality that decided it, why a prompt was or was not in a batch.

    Example:  bapo explain outputs/demo-001 3f2a 17
              bapo explain outputs/demo-001 all 17
    """
    recording = read_recording(open_run(run))
    recorded = recording.step(step)
    replayed = as_recorded(recording)
    asked_for = list(dict.fromkeys(fate.prompt_id for fate in recorded.fates)) if prompt == ALL else []
    prompt_ids = asked_for or [find_prompt(recording, prompt)]
    found = [explain_prompt(recording, replayed, prompt_id, step) for prompt_id in prompt_ids]
    first = compare(recording, replayed).first
    is_exact = first is None or first[0] > step
    if as_json:
        maps = [asdict(explanation) | {"tables_are_exact": is_exact} for explanation in found]
        print_json(maps if prompt == ALL else maps[0])
        return
    for explanation in found:
        say(explanation.sentence)
    if first is not None and not is_exact:
        say(
            f"(the replay of the records differs from the run since step {first[0]}: {first[1]}; what is said of "
            "B_bad, B_high and candidates is of the replay)"
        )
