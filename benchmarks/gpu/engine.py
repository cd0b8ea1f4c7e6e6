"""vLLM: start, log-probs against the learner's, an update under load, tokens/s against bare vLLM."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bapo.config.tree import Config
from bapo.core.sequences import sequences_of
from bapo.core.types import Group
from bapo.runtime.machine import vllm_build
from bapo.runtime.torchvision_build import complete_torchvision
from bapo.tasks.registry import load_task
from benchmarks.gpu.findings import Findings, SkippedError
from benchmarks.gpu.models import SHAPES, dtype_of, world_of, write_model
from benchmarks.rollout_throughput import compare, requests_of
from tests.support.engines import Driven

GOAL_RATIO = 0.95
GOAL_UPDATE_S = 1.0
CANARY = list(range(4, 24))
LIMIT_RMS = {"float32": 1e-3, "bfloat16": 0.25}
"""Root mean square of the difference between engine and learner, nats. With 28 layers of these weights, transformers'
bfloat16 differs from float64 by 0.13: two implementations that round independently differ by 0.18."""


def engine(
    findings: Findings, device: str, *, model: str, tiny: bool, engine_options: dict[str, Any] | None = None
) -> None:
    """Two versions of random weights: start with the first, update to the second while responses are in flight."""
    if vllm_build() is None:
        raise SkippedError("vLLM is not installed")
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=complete_torchvision) as learner:  # process groups of its own
        _measure(findings, learner, device, model, engine_options or {}, tiny=tiny)


def _measure(
    findings: Findings, learner: Executor, device: str, model: str, engine_options: dict[str, Any], *, tiny: bool
) -> None:
    groups, longest = (4, 24) if tiny else (32, 1024)
    dtype, files = learner.submit(write_versions, findings.work, device, model).result()
    config = Config.model_validate({
        "model": {"path": str(findings.work / "v1"), "dtype": dtype},
        "rollout": {
            "max_groups_in_flight": groups, "max_response_tokens": longest, "max_prompt_tokens": 32,
            # The learner measures its log-probs on the same GPU afterwards.
            "engine_options": engine_options | ({} if dtype == "float32" else {"gpu_memory_utilization": 0.6}),
        },
    })  # fmt: skip
    from rollout_server.engines import vllm

    os.environ.update(vllm.ENVIRONMENT)
    start = time.perf_counter()
    sampler = vllm.make_engine(config)
    calls = Driven(sampler, vllm.make_tokenization(config), config)
    findings.add(start_s=time.perf_counter() - start)
    size = config.algorithm.group_size
    prompts = list(load_task("countdown", {"num_train": groups}).prompts("train"))
    start = time.perf_counter()
    sampler.load_weights(files[0], 1)
    findings.add(load_idle_s=time.perf_counter() - start)
    first = calls.finish(requests_of(prompts[:4], size, "first"))
    for request in requests_of(prompts, size, "flight"):
        calls.submit(request)
    crossing = _update_under_load(findings, calls, files[1], longest)
    versions = {(int(low), int(high)) for group in crossing for low, high in group.versions}
    findings.add(versions_in_flight=sorted(versions))
    second = calls.finish(requests_of(prompts[:4], size, "second"))
    flags = argparse.Namespace(
        model=str(findings.work / "v1"), groups=3 * groups, max_tokens=longest, spread=True, rounds=1 if tiny else 2
    )
    result = compare(sampler, config, flags)
    sampler.close()
    findings.add(tokens_per_s=result["tokens_per_s"])
    if tiny:  # bookkeeping of a model without work
        findings.add(ratio=result["ratio"])
    else:
        findings.goal("ratio", result["ratio"], at_least=GOAL_RATIO)
    for version, sampled in ((1, first), (2, second)):  # last: what is required must not cost the figures above
        error = learner.submit(parity, findings.work / f"v{version}", device, dtype, sampled).result()
        findings.add(**{f"v{version}_logprob_max": error["max"]})
        findings.require(f"v{version}_logprob_rms", error["rms"], at_most=LIMIT_RMS[dtype])


def _update_under_load(findings: Findings, calls: Driven, path: str, longest: int) -> list[Group]:
    """Load when a quarter of the responses is sampled, then the canary. Returns: the groups in flight."""
    found: list[Group] = []
    for _ in range(longest // 4):
        found += calls.step()
    running = calls.engine.occupancy.running
    start = time.perf_counter()
    calls.engine.load_weights(path, 2)
    loaded = time.perf_counter()
    calls.engine.logprobs(CANARY)
    answered = time.perf_counter()
    found += calls.finish()
    findings.add(responses_in_flight=running, canary_s=answered - loaded, drain_s=time.perf_counter() - answered)
    findings.goal("load_under_load_s", loaded - start, at_most=GOAL_UPDATE_S)
    return found


def write_versions(work: Path, device: str, model: str) -> tuple[str, list[str]]:
    """In the learner's process: two models, v1 and v2. Returns: dtype of the engine, and the weight files."""
    import torch

    world = world_of(device)
    for version in (1, 2):
        write_model(work / f"v{version}", SHAPES[model], world, seed=version)
    torch.cuda.empty_cache()  # the engine needs it
    return dtype_of(world), [str(work / f"v{version}" / "model.safetensors") for version in (1, 2)]


def parity(folder: Path, device: str, dtype: str, sampled: list[Group]) -> dict[str, float]:
    """In the learner's process: maximum and root mean square of engine minus learner, nats per token."""
    import torch

    from learner.model.policy import load_policy, sequence_microbatch

    world = world_of(device)
    config = Config.model_validate({"model": {"path": str(folder), "dtype": dtype}, "learner": {"compile": False}})
    policy = load_policy(folder, config, world, frozen=True)
    gaps = []
    for group in sampled:
        prompt = group.prompt_token_ids.tolist()
        for response in sequences_of(group):
            token_ids = [*prompt, *response.token_ids.tolist()]
            micro = sequence_microbatch(token_ids, world.device, num_prompt=len(prompt))
            with torch.no_grad():
                gaps.append(policy(micro)[0].cpu().numpy() - response.rollout_logprobs)
    gap = np.concatenate(gaps)
    return {"max": float(np.abs(gap).max()), "rms": float(np.sqrt(np.square(gap).mean()))}
