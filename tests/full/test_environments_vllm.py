"""Environments against the real front and vLLM: adapters of ours, and packages in a Python of their own.

`bapo env install NAME` makes such a Python; BAPO_ENVS is another folder for them.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from bapo.config.agents import AgentsConfig
from bapo.core.sequences import sequences_of
from bapo.core.types import Prompt, RolloutRequest
from bapo.core.user_code import load_function
from bapo.runtime.python_environments import python_of
from bapo.runtime.rank_environment import free_port
from contrib.lookup.task import LookupOptions, LookupTask
from services.agents import standalone
from services.agents.rollouts import load_rollout
from services.agents.runner import AgentRunner
from tests.support.agent_front import LOOKUP, Stage, agents_config, staged, wait_for_groups
from tests.support.factories import make_request
from tests.support.wait import wait_until

SIZE = 4
SUPPORT = Path(__file__).parents[1] / "support" / "environments"
WAYS = SUPPORT / "lookup_ways.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "agents"


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with pytest.MonkeyPatch.context() as patch, staged(agents_config(lease_s=60), [], patch) as found:
        yield found


@pytest.fixture(autouse=True)
def empty(stage: Stage) -> None:
    stage.buffer.groups.clear()


def texts_and_rewards(stage: Stage) -> list[tuple[Prompt, str, float]]:
    """Prompt, all that the model wrote, and reward of each stored episode."""
    tokenizer = AutoTokenizer.from_pretrained(LOOKUP)
    return [
        (group.prompt, tokenizer.decode(response.token_ids, skip_special_tokens=True), float(reward))
        for group in stage.buffer.groups.values()
        for response, reward in zip(sequences_of(group), group.rewards, strict=True)
    ]


def run_here(stage: Stage, name: str, num: int) -> None:
    """Run a rollout of that name until so many groups are stored."""
    settings = AgentsConfig(rollout=name)
    rollout = load_rollout(name, settings)

    async def until_stored() -> None:
        client = openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key="-")
        runner = AgentRunner(
            settings, rollout, stage.client, lambda episode: client.with_options(api_key=episode.key),
            lambda url: stage.client,
        )  # fmt: skip
        task = asyncio.create_task(runner.run())
        await asyncio.to_thread(wait_for_groups, stage, num)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(until_stored())


@pytest.mark.parametrize("name", ["env:{}:Episode", "trl:{}:Trl", "tools:{}:TOOLS"])
def test_lookup_runs_in_each_form_and_its_rewards_are_those_of_its_answers(stage: Stage, name: str) -> None:
    task = LookupTask(LookupOptions(num_train=4))
    stage.buffer.add(
        [
            make_request(request_id=f"{name[:3]}-{i}", group_size=SIZE, prompt=prompt)
            for i, prompt in enumerate(task.prompts("train"))
        ]
    )
    run_here(stage, name.format(WAYS), 4)
    found = texts_and_rewards(stage)
    assert len(found) == 4 * SIZE
    for prompt, text, reward in found:
        answered = task.reward(prompt, text[text.rfind("<answer>") :]) if "<answer>" in text else 0.0
        # The grader of this stage gives 1.0 to whatever has an answer.
        expected = answered if name.startswith("env") else float("<answer>" in text)
        assert reward == expected, text


def test_the_program_of_the_gallery_runs_episodes_by_an_unmodified_client(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    play = load_function(f"{EXAMPLE / 'outside.py'}:play", key="test")
    (prompt,) = LookupTask(LookupOptions(num_train=1)).prompts("train")
    stage.buffer.add([make_request(request_id="outside", group_size=SIZE, prompt=prompt)])
    rewards = play(stage.url)
    wait_for_groups(stage, 1)
    assert [reward for *_, reward in texts_and_rewards(stage)] == rewards


# -- in a Python of their own


def is_open(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0


def python_for(kind: str, how: str = "bapo env install") -> str:
    python = python_of(kind)
    if not python.exists():
        pytest.skip(f"{python} is missing: {how} {kind}")
    return str(python)


def test_a_langgraph_agent_is_trained_as_it_is(stage: Stage) -> None:
    python = python_for("langgraph", "python -m venv, and pip install langgraph==1.2.24 langchain-openai==1.7.4 for")
    (prompt,) = LookupTask(LookupOptions(num_train=1)).prompts("train")
    stage.buffer.add([make_request(request_id="langgraph", group_size=SIZE, prompt=prompt)])
    given = json.dumps({"text": prompt.text, "answer": prompt.answer})
    rewards = []
    for episode in stage.open(SIZE):
        environment = {"OPENAI_BASE_URL": episode.base_url, "OPENAI_API_KEY": episode.key}
        done = subprocess.run(
            [python, EXAMPLE / "langgraph_agent.py"],
            input=given, env=environment, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        rewards.append(float(done.stdout.splitlines()[-1]))
        stage.client.reward(episode.key, rewards[-1])
    wait_for_groups(stage, 1)
    task = LookupTask(LookupOptions())
    for _, text, reward in texts_and_rewards(stage):
        assert reward == task.reward(prompt, text[text.rfind("<answer>") :] if "<answer>" in text else "")


def requests_for(rows: list[dict[str, Any]], name: str) -> list[RolloutRequest]:
    prompts = [
        Prompt(prompt_id=f"{name}{i}", text=row["prompt"], task="lookup", answer=row) for i, row in enumerate(rows)
    ]
    return [make_request(request_id=f"{name}-{i}", group_size=SIZE, prompt=prompt) for i, prompt in enumerate(prompts)]


def run_elsewhere(stage: Stage, python: str, *arguments: str, num: int) -> str:
    """Run the stand-alone program until so many groups are stored. Returns: its log."""
    command = [python, standalone.__file__, *arguments, "--url", stage.url, "--episodes", "16"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=SUPPORT) as process:
        try:
            wait_until(lambda: len(stage.buffer.groups) >= num or process.poll() is not None, timeout_s=120)
        finally:
            process.send_signal(signal.SIGTERM)
            said = process.communicate(timeout=20)[1]
    assert len(stage.buffer.groups) == num, said
    assert process.returncode == 0, said
    return said


def test_verifiers_gives_its_own_reward_of_what_was_recorded(stage: Stage, tmp_path: Path) -> None:
    python, name = python_for("verifiers"), f"verifiers:{SUPPORT / 'verifiers_lookup.py'}"
    exported = [python, standalone.__file__, name, "--export", str(tmp_path / "rows.jsonl")]
    subprocess.run(exported, check=True, capture_output=True)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    stage.buffer.add(requests_for(rows, "vf"))
    said = run_elsewhere(stage, python, name, num=len(rows))
    assert "ungraded" not in said
    right = {"a+c": 42, "b+d": 73, "a+d": 29, "c+b": 47}
    found = texts_and_rewards(stage)
    for prompt, text, reward in found:
        answer = re.search(r"<answer>\s*(\d+)\s*</answer>", text)
        assert reward == float(answer is not None and int(answer[1]) == right[prompt.text]), text
    assert 0 < sum(reward for *_, reward in found) < len(found), "root_reply is set, or every reward would be 0"


def test_tools_of_verifiers_are_offered_and_a_limit_keeps_the_reward(stage: Stage, tmp_path: Path) -> None:
    python, name = python_for("verifiers"), f"verifiers:{SUPPORT / 'verifiers_tools.py'}"
    exported = [python, standalone.__file__, name, "--export", str(tmp_path / "rows.jsonl")]
    subprocess.run(exported, check=True, capture_output=True)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    stage.buffer.add(requests_for(rows[:1], "vt"))
    said = run_elsewhere(stage, python, name, "--max-turns", "2", num=1)
    assert "ungraded" not in said
    assert {reward for *_, reward in texts_and_rewards(stage)} <= {0.25, 0.5}


def test_skyrl_gym_answers_each_message_and_its_rewards_add_up(stage: Stage) -> None:
    python = python_for("skyrl_gym")
    stage.buffer.add(requests_for([{"prompt": "a+c", "first": 0.25}], "sg"))
    said = run_elsewhere(stage, python, "skyrl_gym:skyrl_steps:Steps", num=1)
    assert "ungraded" not in said
    assert [reward for *_, reward in texts_and_rewards(stage)] == [0.75] * SIZE
    (group,) = stage.buffer.groups.values()
    assert {len(response.turns.parents_U) for response in sequences_of(group)} == {2}  # type: ignore[union-attr]


def test_openenv_has_a_session_for_each_episode(stage: Stage) -> None:
    python, port = python_for("openenv"), free_port()
    stage.buffer.add(requests_for([{"prompt": "c+b", "seed": 1}], "oe"))
    with subprocess.Popen([python, str(SUPPORT / "openenv_server.py"), str(port)]) as server:
        try:
            wait_until(lambda: is_open(port))
            options = json.dumps({"reset": ["seed"], "observation": "text"})
            said = run_elsewhere(stage, python, f"openenv:http://127.0.0.1:{port}", "--options", options, num=1)
        finally:
            server.terminate()
    assert "ungraded" not in said
    assert [reward for *_, reward in texts_and_rewards(stage)] == [0.75] * SIZE
