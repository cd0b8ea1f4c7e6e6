"""What the model reads of an agent's call, by vLLM's own routes and without an engine, is the prompt of other runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from bapo.config.tree import Config
from bapo.tasks.prompt_tokens import prompt_token_ids
from bapo.tasks.registry import task_of
from rollout_server.engines.vllm import ENVIRONMENT
from rollout_server.episodes.gate import Gate
from rollout_server.episodes.recorder import ModelCall, Reply
from tests.support.agents import in_loop

LOOKUP = Path("models/lookup-tiny")
DATED = (
    "{{ bos_token }}{{ strftime_now('%d') }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is false %}0{% endif %}{% endif %}"
)
OPTIONS = {"chat_options": {"enable_thinking": False}, "chat_date": "2026-11-22"}
ASK = [{"role": "user", "content": "12"}]
TEXT, IDS = "<bos>22<|user|>12<|assistant|>0", [2, 26, 239, 16, 240, 4]
"""The ids of a number are those of its digits plus 4, up to 99."""

CALLS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": ASK},
    "messages": {"messages": ASK, "max_tokens": 9},
    "responses": {"input": "12"},
    "completions": {"prompt": TEXT},
}


def model(folder: Path) -> Path:
    """The shipped model of agents without weights, and with a tokenizer that adds BOS and EOS to a text."""
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        shutil.copy(LOOKUP / name, folder)
    (folder / "chat_template.jinja").write_text(DATED)
    tokenizer = json.loads((LOOKUP / "tokenizer.json").read_text())
    begin, end = ({"SpecialToken": {"id": name, "type_id": 0}} for name in ("<bos>", "<eos>"))
    tokens = {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in (("<bos>", 2), ("<eos>", 1))}
    tokenizer["post_processor"] |= {
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}, end], "special_tokens": tokens,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@in_loop
async def test_every_address_shows_the_model_what_a_run_without_agents_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    from rollout_server.episodes.vllm_serving import Client, make_app  # here: takes ten seconds

    (data := tmp_path / "train.jsonl").write_text(json.dumps({"prompt": ASK, "answer": "3"}))
    table = {"name": "dataset", "options": {"path": str(data), **OPTIONS}}
    config = Config.model_validate({"model": {"path": str(model(tmp_path))}, "task": table, "agents": {}})
    task, client = task_of(config), Client(config)  # type: ignore[abstract]
    (prompt,) = task.prompts("train")
    assert (prompt.text, prompt_token_ids(client.tokenizer, prompt)) == (TEXT, IDS)
    seen: list[tuple[str | None, list[int]]] = []

    async def sample(call: ModelCall) -> Reply:
        seen.append((call.text, list(call.token_ids)))
        ids, logprobs = np.array([5, 1], np.int32), np.zeros(2, np.float32)
        return Reply(prompt_token_ids=seen[-1][1], token_ids=ids, logprobs=logprobs, truncated=False)

    client.sample = sample
    gate = Gate(
        await make_app(config, client, task.chat_variables()), prompt_of=lambda key: prompt, keyring=None,
        model_name="policy", longest=256, begin=client.tokenizer.bos_token,
    )  # fmt: skip
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://agents/v1/") as agent:
        for path, body in CALLS.items():
            answer = await agent.post(path, json=body, headers={"x-api-key": "key"})
            assert (path, answer.status_code, seen.pop()) == (path, 200, (TEXT, IDS))
