"""A run of two steps with token records written by hand: what the pages of prompts and groups are tested with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bapo.core.types import Origin
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.run_directory.responses import TokenRow
from bapo.runtime.run_directory.transcripts import TurnText
from tests.support.synthetic_runs import metrics_row, result, write_run

GROUP = "hard@2"
HOSTILE = "<script>window.hacked = 1</script></script><img src=x onerror=window.hacked=1>\u001b[31mred\u202eevil\u0000"
"""What a model may write: markup, an end of a script, a terminal's colours, a reversed line, a null."""
LONG = "x" * 100_000


def token_row(row: int, pieces: Sequence[str], *, group: str = GROUP, step: int = 2, **changed: Any) -> TokenRow:
    """A response whose numbers can be told by eye: entropy 0.1 i, ratio 1 + 0.1 i, the second token clipped."""
    size = len(pieces)
    fields: dict[str, Any] = {
        "step": step,
        "group_id": group,
        "prompt_id": group.split("@")[0],
        "prompt": f"12,5,7->{HOSTILE}",
        "task": "countdown",
        "answer": {"target": 24},
        "gold": "12+5+7",
        "origin": "x1",
        "kind": "rl",
        "row": row,
        "reward": float(row == 0),
        "outcome": "graded",
        "oldest_version": 1,
        "newest_version": 2,
        "extracted": "12+5+7" if row == 0 else None,
        "advantage": 1.5 if row == 0 else -0.5,
        "token_ids": list(range(size)),
        "pieces": list(pieces),
        "rollout_logprobs": [-0.5] * size,
        "logprobs": [-0.25] * size,
        "entropy": [0.1 * i for i in range(size)],
        "ratio": [1 + 0.1 * i for i in range(size)],
        "clipped": [i == 1 for i in range(size)],
    }
    return TokenRow(**{**fields, **changed})


def text_row(row: int, text: str, *, group: str = "easy@2", step: int = 2, **changed: Any) -> TokenRow:
    """A right response of a group that did not train: text alone, of seven tokens."""
    none = dict.fromkeys(("origin", "advantage", "rollout_logprobs", "logprobs", "entropy", "ratio", "clipped"))
    alone = {"token_ids": list(range(7)), "reward": 1.0, "extracted": f"easy {row}"}
    return token_row(row, [text], group=group, step=step, **{**none, **alone, **changed})


def _episode() -> list[TokenRow]:
    pieces = ["get(a)", "<eos>", "calc", "(37+5)", "<eos>", "42"]
    turns = [(-1, 2, ""), (0, 3, "<tool>37<assistant>"), (1, 1, "<tool>42<assistant>")]
    forked = [(-1, 2, ""), (0, 3, "<tool>37<assistant>"), (0, 1, f"<tool>{HOSTILE}"), (-2, 2, "<user>a summary")]

    def of(turns: list[tuple[int, int, str]]) -> list[TurnText]:
        return [TurnText(parent=parent, num_tokens=size, context=context) for parent, size, context in turns]

    seen = {"group": "agent@2", "engine_prompt": "<user>a+5<assistant>", "prompt": "a+5"}
    return [
        token_row(0, pieces, turns=tuple(of(turns)), **seen),
        token_row(1, [*pieces, "no", "<eos>"], turns=tuple(of(forked)), **seen),
        token_row(2, ["5"], **seen),
    ]


EPISODE = _episode()
"""Three episodes: one whose history grows, one with a fork and a new history, and one of a single turn."""


def write_rollout_run(path: Path) -> RunDirectory:
    """Prompt `hard` is all wrong in step 1 and has 1 of 4 right in step 2, whose batch is recorded."""
    groups = {
        1: [
            result("hard", "0000", step=1, reason="all_incorrect", version=1, birth=1),
            result("easy", "1110", step=1, reason="informative", version=1, birth=1, origin=Origin.X1),
            result("middle", "1100", step=1, reason="informative", version=1, birth=1, origin=Origin.X1),
            result("zero", "0000", step=1, reason="all_incorrect", version=1, birth=1),
        ],
        2: [
            result("hard", "1000", step=2, reason="informative", version=2, birth=2, origin=Origin.X1),
            result("easy", "1111", step=2, reason="all_correct", version=2, birth=2),
            result("other", "0100", step=2, reason="informative", version=2, birth=2, origin=Origin.X1),
            result("zero", "0000", step=2, reason="all_incorrect", version=2, birth=2),
        ],
    }
    run = write_run(
        path,
        metrics=[metrics_row(1, reward_mean=5 / 16), metrics_row(2, reward_mean=6 / 16)],
        groups=groups,
        overrides=["--diagnostics.token_records", "2", "--diagnostics.texts", "2", "--algorithm.use_x3", "false"],
    )
    rows = [
        token_row(0, ["12", "+5", "+7", " is 24"]),
        token_row(1, [HOSTILE, " no"]),
        token_row(2, [LONG, "\n", "end"]),
        token_row(
            3, [f"word{i} " for i in range(3000)], advantage=0.0, entropy=None, ratio=None, clipped=None, logprobs=None
        ),
    ]
    other = [token_row(row, ["nothing", " here"], group="other@2", prompt="1,2->3") for row in range(4)]
    easy = [text_row(row, f"easy answer {row} {HOSTILE}") for row in range(4)]
    run.token_files.write(2, [rows, other, easy])
    return run


def write_agent_run(path: Path) -> RunDirectory:
    """One step of agents, whose batch is `EPISODE`, and a group that did not train: texts alone."""
    figures = {
        "num_episodes": 3,
        "episode_turns_mean": 2.667,
        "episode_context_tokens_mean": 6.0,
        "episode_forked_share": 0.333,
        "episode_calls_mean": {"get": 0.5, "calc": 0.25},
    }
    none = {f"tool-{number}": 0.125 for number in range(5)}
    metrics = [metrics_row(1), metrics_row(2, **figures), metrics_row(3, **figures | {"episode_calls_mean": none})]
    groups = {
        2: [
            result("agent", "100", step=2, reason="informative", version=2, birth=2, origin=Origin.X1),
            result("easy", "1", step=2, reason="all_correct", version=2, birth=2),
        ]
    }
    overrides = ["--diagnostics.token_records", "2", "--diagnostics.texts", "2"]
    run = write_run(path, metrics=metrics, groups=groups, overrides=overrides)
    turns = [TurnText(parent=-1, num_tokens=4, context=""), TurnText(parent=0, num_tokens=3, context="<tool>" + LONG)]
    alone = [token_row(0, ["get(b)", "7"], group="easy@2", turns=tuple(turns))]
    none_ = dict.fromkeys(("origin", "advantage", "rollout_logprobs", "logprobs", "entropy", "ratio", "clipped"))
    run.token_files.write(2, [EPISODE, [replace(alone[0], token_ids=list(range(7)), **none_)]])
    return run
