"""`bapo simulate`: the batches of a recorded run under other settings of composition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from bapo.commands.arguments import open_run
from bapo.commands.buffer_where import AsJson, make_console, print_json
from bapo.commands.simulate_table import comparison_table
from bapo.config.load import diff, load_resolved
from bapo.config.tree import Config
from bapo.plain_text import plain
from bapo.records import RunDirectory
from bapo.types import Origin
from bapo.whatif.recording import Recording, read_recording
from bapo.whatif.reevaluation import Source
from bapo.whatif.reproduction import Reproduction, compare
from bapo.whatif.simulation import SimulatedStep, as_recorded, what_if

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
