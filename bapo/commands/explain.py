"""`bapo explain`: why a prompt was or was not in a batch."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from bapo.commands.arguments import open_run, say
from bapo.commands.buffer_where import AsJson, print_json
from bapo.commands.simulate import RunArgument
from bapo.whatif.explanation import explain as explain_prompt
from bapo.whatif.explanation import find_prompt
from bapo.whatif.recording import read_recording
from bapo.whatif.reproduction import compare
from bapo.whatif.simulation import as_recorded

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
