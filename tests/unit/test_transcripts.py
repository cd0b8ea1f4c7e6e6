"""Transcripts of episodes: which text is of which turn, where it continues, and what `bapo explain` prints of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bapo.cli.app import app
from bapo.cli.recorded.transcript import MOST_CHARS, transcript
from bapo.core.types import GroupResult
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.run_directory.transcripts import fork_of, pieces_by_turn
from tests.support.recorded_responses import EPISODE, token_row
from tests.unit.test_whatif import write_trace


@pytest.mark.parametrize(
    ("turn", "parent", "words"),
    [
        (0, -1, ""),
        (0, -2, ""),
        (1, 0, ""),
        (2, 0, "fork: continues turn 0"),
        (2, -1, "history was changed: starts again after the prompt"),
        (2, -2, "history was changed: starts again"),
    ],
)
def test_a_fork_says_where_it_continues(turn: int, parent: int, words: str) -> None:
    assert fork_of(turn, parent) == words


def test_pieces_are_of_the_turn_that_sampled_them_or_are_one_for_each() -> None:
    assert pieces_by_turn(["a", "b", "c"], [2, 1]) == [["a", "b"], ["c"]]
    assert pieces_by_turn(["ab", "c"], [2, 1]) == [["ab"], ["c"]]
    assert pieces_by_turn(["a", "b"], []) == [["a", "b"]]


def test_context_is_dim_in_a_terminal_and_a_long_text_says_how_much_is_left_out() -> None:
    shown = {line.plain.split()[0]: line for line in transcript(EPISODE[:1])}
    dim = {word: [span.end - span.start for span in shown[word].spans] for word in ("context", "sampled")}
    assert dim == {"context": [9, len("<tool>42<assistant>")], "sampled": [9]}  # of the last turn: "sampled  42"
    assert {span.style for word in dim for span in shown[word].spans} == {"bright_black"}
    assert not shown["sampled"].style
    *_, last = transcript([token_row(0, ["x" * (MOST_CHARS + 7)])])
    assert last.plain.endswith("x ... (7 more characters)")


def test_the_command_prints_recorded_responses_turn_by_turn(tmp_path: Path) -> None:
    run = write_trace(tmp_path / "trace")
    asked = ["explain", str(run.path), "j", "2", "--responses"]
    assert "no text of it is recorded in this step" in CliRunner().invoke(app, asked).output
    group = next(result for result in run_results(run, 2) if result.prompt_id == "j").group_id
    run.token_files.write(2, [[replace(row, group_id=group) for row in EPISODE]])
    lines = CliRunner().invoke(app, asked).output.splitlines()[1:]
    assert lines[:9] == [
        f"group {group}",
        "  prompt   <user>a+5<assistant>",
        "  response 0: reward 1, advantage 1.5, extracted 12+5+7, 3 turns",
        "    turn 0",
        "      sampled  get(a)<eos>",
        "    turn 1",
        "      context  <tool>37<assistant>",
        "      sampled  calc(37+5)<eos>",
        "    turn 2",
    ]
    assert "    turn 2, fork: continues turn 0" in lines
    assert "    turn 3, history was changed: starts again" in lines
    assert lines[-2:] == ["  response 2: reward 0, advantage -0.5", "    sampled  5"]
    assert not any("\x1b" in line for line in lines)  # of what a tool's answer tries
    as_json = json.loads(CliRunner().invoke(app, [*asked, "--json"]).output)["responses"]
    assert [row["text"] for row in as_json] == ["42", "no<eos>", "5"]
    assert as_json[0]["turns"][1] == {
        "parent": 0, "num_tokens": 3, "context": "<tool>37<assistant>", "text": "calc(37+5)<eos>"
    }  # fmt: skip


def run_results(run: RunDirectory, step: int) -> Sequence[GroupResult]:
    ((_, results),) = run.read_groups([step])
    return results
