"""A ledger that agents keep of their own episodes, and what it says of a run: every trained response is one of them.

    agent:  <key> reply -0.11 -0.52 ...     each reply that reached it, as the log-probs of its tokens
            <key> reward 1.0                before it is reported
    run:    token_records                   each trained response: log-probs by turn, reward

A turn that was lost, stored twice or never acknowledged, a reward that no agent gave and an episode that trains under
two groups would each be a response that no line accounts for.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bapo.core.types import Prompt
from bapo.runtime.run_directory.responses import TokenFiles, TokenRow
from contrib.lookup import agent

FOLDER = "BAPO_TEST_LEDGER"
"""Environment variable with the folder of the ledgers, one file per process."""
DIGITS = 4

Episode = tuple[tuple[tuple[float, ...], ...], float]
"""Rounded log-probs of its tokens by turn, and its reward."""


async def rollout(client: Any, prompt: Prompt) -> float | None:
    """The agent of `lookup`, that writes down what reaches it."""
    ledger = Path(os.environ[FOLDER], f"{os.getpid()}.jsonl")
    key, create = client.api_key, client.chat.completions.create

    async def written(**arguments: Any) -> Any:
        reply = await create(**arguments, logprobs=True)
        _write(ledger, {"key": key, "reply": [token.logprob for token in reply.choices[0].logprobs.content]})
        return reply

    client.chat.completions.create = written
    reward = await agent.rollout(client, prompt)
    _write(ledger, {"key": key, "reward": reward})
    return reward


def _write(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def unaccounted(run_path: Path, folder: Path) -> tuple[list[str], dict[str, int]]:
    """(a sentence for each trained response that no episode of the ledger is, numbers of what was compared)."""
    known = Counter(_episodes(folder))
    trained = {(row.group_id, row.row): (row.step, _episode_of(row)) for row in _trained(run_path)}
    wrong = []
    for (group_id, row), (step, episode) in trained.items():
        if known[episode] < 1:
            wrong.append(f"step {step}: response {row} of {group_id} is no episode of an agent, or trains twice")
        known[episode] -= 1
    turns = sum(len(episode[0]) for _, episode in trained.values())
    return wrong, {"episodes_trained": len(trained), "turns_trained": turns}


def _episodes(folder: Path) -> Iterator[Episode]:
    replies: dict[str, list[tuple[float, ...]]] = {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:  # its process was killed while it wrote
                continue
            if "reply" in entry:
                replies.setdefault(entry["key"], []).append(_rounded(entry["reply"]))
            else:
                yield tuple(replies.pop(entry["key"])), entry["reward"]


def _trained(run_path: Path) -> Iterator[TokenRow]:
    """The rows of each group where it trained first: reused ones train again."""
    files, seen = TokenFiles(run_path), set[str]()
    for step in files.steps():
        for group_id in dict.fromkeys(head["group_id"] for head in files.read_heads(step) if head["origin"]):
            if group_id not in seen:
                seen.add(group_id)
                yield from files.read_group(step, group_id)


def _episode_of(row: TokenRow) -> Episode:
    assert row.rollout_logprobs is not None
    sizes = [turn.num_tokens for turn in row.turns] or [len(row.rollout_logprobs)]
    values = iter(row.rollout_logprobs)
    return tuple(_rounded([next(values) for _ in range(size)]) for size in sizes), row.reward


def _rounded(values: list[float]) -> tuple[float, ...]:
    return tuple(round(value, DIGITS) for value in values)
