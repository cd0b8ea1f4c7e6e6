"""What a call of the model costs an agent, over bare vLLM: every process real, one token per call.

    python -m benchmarks.agent_calls [--calls 300] [--episodes 256] --out agent_calls.json

`bapo up` serves models/lookup-tiny; an agent in this process calls `/v1/completions` one call after the other (seconds
per call), then 64 episodes of `contrib.lookup` at a time (episodes and calls per second). Bare: one request of one
token after the other in an `LLMEngine` of a process of its own, before and after. The journal's times are those that
the rollout server counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import openai
import urllib3

from bapo.config.load import load_resolved
from bapo.runtime.auth.api_tokens import Role
from bapo.runtime.auth.token_store import set_of_run
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.transport.endpoints import AGENTS, ROLLOUT_SERVER
from bapo.transport.episode_client import EpisodeClient, OpenedEpisode
from contrib.lookup.agent import rollout
from tests.support.launch import FREE_PORTS, kill_family, start
from tests.support.wait import wait_until

CONFIG = "deploy/configs/demo-agents.toml"
MODEL = "models/lookup-tiny"
PROMPT = "a+b-c"
OPEN = 64
START_S = 180.0


def bare(calls: int) -> list[float]:
    """Seconds of each one-token request in vLLM itself."""
    from rollout_server.engines import vllm

    os.environ.update(vllm.ENVIRONMENT)
    from vllm import LLMEngine, SamplingParams, TokensPrompt
    from vllm.engine.arg_utils import EngineArgs

    engine = LLMEngine.from_engine_args(
        EngineArgs(model=MODEL, dtype="float32", max_model_len=256, gpu_memory_utilization=0.1)
    )
    token_ids = engine.get_tokenizer().encode(PROMPT)
    took = []
    for number in range(calls):
        began = time.perf_counter()
        params = SamplingParams(max_tokens=1, logprobs=0)
        engine.add_request(str(number), TokensPrompt(prompt_token_ids=token_ids), params)
        while engine.has_unfinished_requests():
            engine.step()
        took.append(time.perf_counter() - began)
    return took[calls // 5 :]


def one_after_the_other(episodes: list[OpenedEpisode], calls: int) -> list[float]:
    """Seconds of each one-token call of an agent; at most 40 calls per episode."""
    client, took = openai.OpenAI(base_url=episodes[0].base_url, api_key="-"), []
    for number in range(calls):
        own = client.with_options(api_key=episodes[number // 40].key)
        began = time.perf_counter()
        own.completions.create(model="policy", prompt=PROMPT, max_tokens=1)
        took.append(time.perf_counter() - began)
    return took[calls // 5 :]


async def many(service: EpisodeClient, num: int) -> float:
    """Seconds of `num` episodes of the agent, `OPEN` at a time."""
    left = num

    async def lane() -> None:
        nonlocal left
        while left > 0:
            for episode in await asyncio.to_thread(service.open, 1, wait_s=10.0):
                left -= 1
                own = client.with_options(base_url=episode.base_url, api_key=episode.key)
                reward = await rollout(own, episode.prompt)
                await asyncio.to_thread(service.reward, episode.key, float(reward or 0.0))

    client = openai.AsyncOpenAI(base_url="http://-", api_key="-")
    began = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(OPEN)))
    return time.perf_counter() - began


def counted(run: RunDirectory) -> dict[str, float]:
    """Calls, and the buckets of the journal's seconds, from the rollout server's metrics."""
    token = set_of_run(run.path).path_of(Role.VIEWER).read_text().strip()
    url, headers = f"http://127.0.0.1:{run.read_port(ROLLOUT_SERVER)}/metrics", {"Authorization": f"Bearer {token}"}
    text = urllib3.request("GET", url, headers=headers).data.decode()
    found = re.findall(r"bapo_episode_(?:events_total|call_seconds_bucket)\{([^}]*)\} (\S+)", text)
    return {labels: float(value) for labels, value in found}


def quantile(before: dict[str, float], after: dict[str, float], share: float) -> float:
    """Upper bound of the bucket of the journal's seconds with this share of the calls."""
    buckets = []
    for labels, value in after.items():
        if 'phase="journal"' in labels and (bound := re.search(r'le="([^"]+)"', labels)):
            buckets.append((float(bound[1]), value - before.get(labels, 0.0)))
    total = max(count for _, count in buckets)
    return next(bound for bound, count in sorted(buckets) if count >= share * total)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything with the services up."""
    place = ["--run.root", str(folder), "--run.name", "run", "--agents.port", "0", "--agents.rollout", "null"]
    process = start(["up", CONFIG, *place, *FREE_PORTS, "--algorithm.batch_size", "128", "--agents.max_turns", "1000"])
    run = RunDirectory(folder / "run")
    try:
        wait_until(lambda: run.path.exists() and run.read_port(AGENTS), timeout_s=START_S)
        config = load_resolved(run.config_path)
        token = set_of_run(run.path).path_of(Role.AGENT).read_text().strip()
        service = EpisodeClient(f"http://127.0.0.1:{run.read_port(AGENTS)}", token=token)
        episodes = service.open(args.calls // 40 + 1, wait_s=60.0)
        alone = one_after_the_other(episodes, args.calls)
        before = counted(run)
        seconds = asyncio.run(many(service, args.episodes))
        time.sleep(2.0)  # the metrics are shown once a second
        after = counted(run)
    finally:
        kill_family(process)
    calls = next(after[key] - before.get(key, 0.0) for key in after if 'event="turn"' in key)
    return {
        "group_size": config.algorithm.group_size,
        "call_s": {"p50": statistics.median(alone), "p95": statistics.quantiles(alone, n=20)[-1]},
        "episodes_per_s": args.episodes / seconds,
        "calls_per_s": calls / seconds,
        "journal_s_at_most": {"p50": quantile(before, after, 0.5), "p99": quantile(before, after, 0.99)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    def bare_median() -> float:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return statistics.median(pool.submit(bare, args.calls).result())

    first = bare_median()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args, Path(folder))
    found["bare_s"] = {"before": first, "after": bare_median()}
    found["overhead_s"] = found["call_s"]["p50"] - statistics.mean(found["bare_s"].values())
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
