"""Recorded responses in a terminal, for `bapo explain --responses`: an episode turn by turn, its context dim.

    response 1: reward 0, advantage -0.5, extracted 42, 4 turns
      turn 1
        context  <|tool|>37<|assistant|>
        sampled  calc 37+5
      turn 2, fork: continues turn 0

Which text is context is also said by a word, because a pipe has no colors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.text import Text

from bapo.core.reward_details import as_columns, shown_details
from bapo.core.text import plain, plain_lines
from bapo.core.types import GroupResult
from bapo.runtime.run_directory.responses import TokenFiles, TokenRow
from bapo.runtime.run_directory.transcripts import fork_of

MOST_CHARS = 4000
"""Of one text; the page of the run has all of it."""
DIM = "bright_black"
INDENT = "  "


def recorded_responses(files: TokenFiles, step: int, results: Sequence[GroupResult]) -> list[list[TokenRow]]:
    """Responses of each group that the step has a record of. Raises: ContractError."""
    names = dict.fromkeys(result.item or result.group_id for result in results)
    return [rows for name in names if (rows := files.read_group(step, name))]


def transcript(rows: Sequence[TokenRow]) -> Iterator[Text]:
    """The responses of one group, at least one, as lines."""
    first = rows[0]
    yield Text(f"group {plain(first.group_id)}", "bold")
    yield from _block("prompt", first.prompt if first.engine_prompt is None else first.engine_prompt, INDENT, DIM)
    for row in rows:
        yield Text(INDENT + _headline(row))
        texts = _texts(row)
        if not row.turns:
            yield from _block("sampled", texts[0], 2 * INDENT)
            continue
        for number, (turn, text) in enumerate(zip(row.turns, texts, strict=True)):
            fork = fork_of(number, turn.parent)
            yield Text(f"{2 * INDENT}turn {number}").append(f", {fork}" if fork else "", "yellow")
            if turn.context:
                yield from _block("context", turn.context, 3 * INDENT, DIM)
            yield from _block("sampled", text, 3 * INDENT)


def responses_as_maps(groups: Sequence[Sequence[TokenRow]]) -> list[Mapping[str, Any]]:
    """The same for `--json`: `text` is what a reward function reads."""
    names = ("group_id", "row", "reward", "outcome", "advantage", "extracted", "engine_prompt", "text")
    return [
        {name: getattr(row, name) for name in names}
        | as_columns(row.reward_details)
        | {"turns": [asdict(turn) | {"text": text} for turn, text in zip(row.turns, _texts(row), strict=False)]}
        for rows in groups
        for row in rows
    ]


def _texts(row: TokenRow) -> list[str]:
    return ["".join(pieces) for pieces in row.pieces_of_turns]


def _headline(row: TokenRow) -> str:
    details = shown_details(as_columns(row.reward_details))
    parts = [f"reward {row.reward:.4g}{f' ({details})' if details else ''}"]
    parts += [] if row.advantage is None else [f"advantage {row.advantage:.4g}"]
    parts += [] if row.extracted is None else [f"extracted {plain(row.extracted)}"]
    parts += [] if row.outcome == "graded" else [row.outcome]
    parts += [f"{len(row.turns)} turns"] if row.turns else []
    return f"response {row.row}: {', '.join(parts)}"


def _block(word: str, text: str, indent: str, style: str = "") -> Iterator[Text]:
    """A text after its word, further lines below its beginning; what a terminal obeys is escaped."""
    more = len(text) - MOST_CHARS
    shown = plain_lines(text[:MOST_CHARS]) + (f" ... ({more} more characters)" if more > 0 else "")
    for number, line in enumerate(shown.split("\n")):
        yield Text(indent).append(f"{'' if number else word:<9}", DIM).append(line, style)
