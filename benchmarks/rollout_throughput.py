"""Rollout tokens/s through our worker over bare vLLM on the same prompts: 32 groups of 8 in flight.

    OMP_NUM_THREADS=1 python -m benchmarks.rollout_throughput [--rounds 5] [--out rollout_throughput.json]

Ours: a `Worker` with everything real: requests claimed over HTTP from another process, groups sampled with log-probs,
texts decoded, graded in child processes, packed, pushed over HTTP; from the first claim to the last acknowledgement.
Bare: `LLMEngine.add_request` of the same prompts (G = 8, log-prob of the sampled token) and `step` until all are done;
no text, no grading, nothing read from the outputs but the number of tokens.
Both use one engine in this process and alternate, so that a busy machine hits both alike. `ratio` is of tokens per wall
second, `cpu_ratio` of tokens per CPU second of this process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bapo.config.tree import Config
from bapo.core.types import Prompt, Purpose, RolloutRequest
from bapo.tasks.grading.pool import GraderPool
from bapo.tasks.registry import load_task
from bapo.transport.buffer_client import BufferClient
from rollout_server.delivery import NUM_GRADERS
from rollout_server.engines import vllm
from rollout_server.engines.base import Engine
from rollout_server.worker import Worker

TARGET = 0.9
POLL_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One measurement of one of the two."""

    num_tokens: int
    wall_s: float
    cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.num_tokens / self.cpu_s


def timed(sample: Callable[[], int]) -> Round:
    """Run `sample`, which returns how many tokens it made."""
    wall, cpu = time.perf_counter(), time.process_time()
    num_tokens = sample()
    return Round(num_tokens=num_tokens, wall_s=time.perf_counter() - wall, cpu_s=time.process_time() - cpu)


def serve_buffer(connection: Connection) -> None:
    """Process: a buffer in memory behind the real routes; told what to hand out, it says when all is back."""
    from tests.support.rollout import MemoryBuffer, Served, buffer_app

    buffer = MemoryBuffer()
    connection.send(Served(buffer_app(buffer)).url)
    while (requests := connection.recv()) is not None:
        buffer.groups.clear()
        buffer.add(requests)
        while len(buffer.groups) < len(requests):
            time.sleep(POLL_S)
        connection.send(sum(len(group.token_ids) for group in buffer.groups.values()))


def requests_of(
    prompts: list[Prompt], group_size: int, name: str, *, longest: list[int] | None = None
) -> list[RolloutRequest]:
    """One request per prompt: fresh, or an evaluation whose responses have at most `longest` tokens."""
    return [
        RolloutRequest(
            request_id=f"{name}-{i:04d}",
            prompt=prompt,
            group_size=group_size,
            purpose=Purpose.EVALUATE if longest else Purpose.FRESH,
            label=name if longest else "",
            step=1,
            min_version=1,
            max_response_tokens=longest[i] if longest else None,
        )
        for i, prompt in enumerate(prompts)
    ]


def spread(num: int, longest: int) -> list[int]:
    """Limits from a quarter of `longest` to all of it: random weights never end a response, so that otherwise all
    responses would end in one step, and neither would refill its engine."""
    return [max(1, longest * (1 + i % 4) // 4) for i in range(num)]


def bare(engine: Any, sampling: Any, prompts: list[list[int]], group_size: int, longest: list[int]) -> int:
    """Plain vLLM: all prompts at once, steps until they are done."""
    from vllm import TokensPrompt

    for i, token_ids in enumerate(prompts):
        params = sampling.clone()
        params.n, params.max_tokens = group_size, longest[i]
        engine.add_request(f"bare-{i}", TokensPrompt(prompt_token_ids=token_ids), params)
    num_tokens = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            num_tokens += sum(len(response.token_ids) for response in output.outputs)
    return num_tokens


class Kept:
    """The engine for one worker after another: closing it ends only the worker."""

    def __init__(self, engine: vllm.VllmEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def close(self) -> None:
        """Not yet."""


def through_worker(config: Config, engine: Engine, url: str, connection: Connection, requests: list[Any]) -> Round:
    """Our worker; its start and end are not part of the measurement."""
    worker = Worker(
        worker_id="worker-0",
        config=config,
        buffer=BufferClient(url),
        make_engine=lambda _: engine,
        make_tokenization=vllm.make_tokenization,
        make_grader=lambda config: GraderPool(config.task, num_children=NUM_GRADERS),
    )
    worker.load()
    worker.begin(None)

    def sample() -> int:
        connection.send(requests)
        return int(connection.recv())

    measured = timed(sample)
    worker.stop()
    return measured


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All rounds of both with an engine of its own."""
    os.environ.update(vllm.ENVIRONMENT)
    config = Config.model_validate(
        {
            "model": {"path": args.model},
            "rollout": {"max_groups_in_flight": 32, "max_response_tokens": args.max_tokens, "max_prompt_tokens": 32},
        }
    )
    return compare(vllm.make_engine(config), config, args)


def compare(engine: vllm.VllmEngine, config: Config, args: argparse.Namespace) -> dict[str, Any]:
    """All rounds of both, alternating, with this engine."""
    ours_end, buffer_end = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve_buffer, args=(buffer_end,), daemon=True)
    process.start()
    url = ours_end.recv()
    prompts = list(load_task("countdown", {"num_train": args.groups}).prompts("train"))
    llm, sampling, tokenizer = engine._engine, engine._sampling.clone(), engine._engine.get_tokenizer()
    token_ids = [tokenizer.encode(prompt.text) for prompt in prompts]
    size, longest = config.algorithm.group_size, [config.rollout.max_response_tokens] * args.groups
    if args.spread:
        longest = spread(args.groups, config.rollout.max_response_tokens)
    bare(llm, sampling, token_ids[:32], size, longest)  # the first batch of a process is slow
    rounds: dict[str, list[Round]] = {"bare": [], "worker": []}
    for i in range(args.rounds):
        rounds["bare"].append(timed(lambda: bare(llm, sampling, token_ids, size, longest)))
        requests = requests_of(prompts, size, f"round-{i}", longest=longest)
        rounds["worker"].append(through_worker(config, Kept(engine), url, ours_end, requests))  # type: ignore[arg-type]
        print(*(f"{name} {measured[-1].tokens_per_s:.0f} tok/s" for name, measured in rounds.items()), flush=True)
    ours_end.send(None)
    return summary(args, rounds)


def summary(args: argparse.Namespace, rounds: dict[str, list[Round]]) -> dict[str, Any]:
    """Medians over the rounds, and of the ratios within each round."""

    def ratio(of: Callable[[Round], float]) -> float:
        return statistics.median(of(w) / of(b) for b, w in zip(rounds["bare"], rounds["worker"], strict=True))

    return {
        "benchmark": "rollout_throughput",
        "model": args.model,
        "groups": args.groups,
        "rounds": args.rounds,
        "tokens_per_s": {name: round(statistics.median(r.tokens_per_s for r in all_)) for name, all_ in rounds.items()},
        "tokens_per_cpu_s": {
            name: round(statistics.median(r.tokens_per_cpu_s for r in all_)) for name, all_ in rounds.items()
        },
        "ratio": round(ratio(lambda r: r.tokens_per_s), 3),
        "cpu_ratio": round(ratio(lambda r: r.tokens_per_cpu_s), 3),
        "target": TARGET,
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/countdown-tiny")
    parser.add_argument("--groups", type=int, default=192, help="groups per round: six times what is in flight")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--spread", action="store_true", help="limits of a quarter to all of --max-tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = json.dumps(measure(args), indent=2)
    print(result)
    if args.out:
        args.out.write_text(result + "\n")


if __name__ == "__main__":
    main()
