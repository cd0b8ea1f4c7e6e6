"""The learner: ceilings of the GPU, log-probs and gradients against float64, tokens/s and MFU of `Updater.run`."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.models import SHAPES, Shape, learner_config, world_of, write_model
from benchmarks.learner_throughput import make_batch
from learner.diagnostics.utilization import peak_tflops
from learner.distributed.sharding import whole
from learner.distributed.stopping import StopFlag
from learner.distributed.world import World
from learner.model.layers import STEPS_TO_MEASURE
from learner.model.policy import load_policy
from learner.startup import out_of_memory
from learner.update.passes import Passes
from learner.update.step import StepInputs, step_inputs
from learner.update.update import Updater

GOAL_MFU = 0.4
"""For 1.7 B and 4 B parameters with responses of up to 8,192 tokens, on one H200."""
LIMITS = {"float32": (1e-3, 1e-3), "bfloat16": (0.1, 0.1)}
"""Root mean square of the error of log-probs in nats, and relative error of the gradient."""
NUM_KERNELS = 15


def ceilings(findings: Findings, device: str, *, tiny: bool) -> None:
    """What the machine can do: products of large bfloat16 matrices, copies on the device and from and to the host."""
    world = world_of(device)
    size, num_bytes = (256, 1 << 20) if tiny else (8192, 1 << 30)
    left, right = (torch.randn(size, size, device=world.device, dtype=torch.bfloat16) for _ in range(2))
    tflops = 2 * size**3 / seconds_of(lambda: left @ right, world) / 1e12
    here = torch.empty(num_bytes, dtype=torch.uint8, device=world.device)
    there = torch.empty_like(here)
    findings.add(
        gemm_tflops=tflops,
        copy_gb_s=2 * num_bytes / seconds_of(lambda: there.copy_(here), world) / 1e9,
    )
    if world.device.type == "cuda":
        pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        name = torch.cuda.get_device_name(world.device)
        findings.add(
            pageable_to_host_gb_s=num_bytes / seconds_of(lambda: here.to("cpu"), world) / 1e9,
            pinned_to_host_gb_s=num_bytes / seconds_of(lambda: pinned.copy_(here, non_blocking=True), world) / 1e9,
            pinned_to_device_gb_s=num_bytes / seconds_of(lambda: here.copy_(pinned, non_blocking=True), world) / 1e9,
            gpu=name,
            gemm_of_peak=tflops / (peak_tflops(name) or float("nan")),
        )


def seconds_of(action: Callable[[], Any], world: World, repeats: int = 10) -> float:
    """Seconds per call, without the first two."""
    for _ in range(2):
        action()
    wait(world)
    start = time.perf_counter()
    for _ in range(repeats):
        action()
    wait(world)
    return (time.perf_counter() - start) / repeats


def wait(world: World) -> None:
    """Until the device has done what was queued."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def float64(findings: Findings, device: str, *, model: str) -> None:
    """Log-probs and gradients of the packed learner against the plain model in float64, on fresh random tokens."""
    world, shape, folder = world_of(device), SHAPES[model], findings.work / "model"
    write_model(folder, shape, world, layers=4, seed=int(time.time()))
    batch = make_batch(
        2, shape.vocab, seed=time.time_ns() % 2**32, prompt=16, shortest=min(128, shape.longest // 4),
        longest=min(512, shape.longest),
    )  # fmt: skip
    for dtype in ("float32", "bfloat16"):
        config = learner_config(folder, world, shape, dtype=dtype, num_groups=2)
        inputs = step_inputs(batch, config, world.device, None)
        coef_M = torch.randn(len(inputs.rollout_M), device=world.device) / len(inputs.rollout_M) ** 0.5
        passes = Passes(world, config.learner.microbatch_tokens, findings.work)
        logp_M, gradient, kernels = _packed(folder, config, passes, inputs, coef_M, world)
        want_M, exact = _plain(folder, inputs, coef_M)
        error = (logp_M.double() - want_M).square().mean().sqrt().item()
        worst = (logp_M.double() - want_M).abs().max().item()
        norm = sum(value.square().sum() for value in exact.values()) ** 0.5
        gap = sum((gradient[name].double() - value).square().sum() for name, value in exact.items()) ** 0.5
        findings.add(**{f"{dtype}_logprob_max": worst})
        findings.require(f"{dtype}_logprob_rms", error, at_most=LIMITS[dtype][0])
        findings.require(f"{dtype}_gradient_error", float(gap / norm), at_most=LIMITS[dtype][1])
        if world.device.type == "cuda":
            findings.add(**{f"{dtype}_flash": any("flash" in name.lower() for name in kernels)})


def _packed(
    folder: Path, config: Any, passes: Passes, inputs: StepInputs, coef_M: Tensor, world: World
) -> tuple[Tensor, dict[str, Tensor], set[str]]:
    """[M] log-probs, whole gradients of sum(coef * log-prob), and names of the kernels that ran."""
    policy = load_policy(folder, config, world)
    logp_M = torch.zeros_like(inputs.rollout_M)
    with torch.profiler.profile() as profile:
        for micro in passes.microbatches(inputs, np.arange(len(inputs.columns.lengths_R))):
            logprobs_M, _ = policy(micro)
            (logprobs_M * coef_M[micro.slot_M]).sum().backward()
            logp_M[micro.slot_M] = logprobs_M.detach()
    gradients = {
        name: whole(parameter.grad) for name, parameter in policy.model.named_parameters() if parameter.grad is not None
    }
    return logp_M, gradients, {event.key for event in profile.key_averages()}


def _plain(folder: Path, inputs: StepInputs, coef_M: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The same, one response at a time, in float64 with transformers' own forward pass."""
    device, columns = coef_M.device, inputs.columns
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").to(device)
    found = []
    for i, group in enumerate(columns.group_R):
        span = slice(int(columns.starts_R[i]), int(columns.starts_R[i + 1]))
        prompt, response = columns.prompts_E[group], torch.from_numpy(columns.token_ids_M[span]).to(device)
        token_ids = torch.cat((torch.from_numpy(prompt).to(device), response))
        logits = model(token_ids[None, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
        logp_T = logits.log_softmax(-1).gather(1, response[:, None]).squeeze(1)
        (logp_T * coef_M[span]).sum().backward()
        found.append(logp_T.detach())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return torch.cat(found), {name: gradient for name, gradient in gradients.items() if gradient is not None}


def update(
    findings: Findings,
    device: str,
    *,
    model: str,
    learner: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
) -> None:
    """Two updates of a batch of 32 long responses after three that warm up: tokens/s, MFU, peak memory, kernels.

    A model that does not fit is a result: the figure `out_of_memory` has the learner's advice.
    """
    world, shape, folder = world_of(device), SHAPES[model], findings.work / "model"
    findings.add(parameters=write_model(folder, shape, world))
    config = learner_config(folder, world, shape, dtype="bfloat16", num_groups=4, lora=lora, **(learner or {}))
    try:
        _updates(findings, config, shape, world, is_goal=model in ("1.7B", "4B") and not learner and not lora)
    except RuntimeError as error:
        advice = out_of_memory(error, config.learner, rank=0, device=world.device)
        if advice is None:
            raise
        findings.add(out_of_memory=str(advice), peak_gb=peak_gb(world))


def _updates(findings: Findings, config: Any, shape: Shape, world: World, *, is_goal: bool) -> None:
    start = time.perf_counter()
    policy = load_policy(config.model.path, config, world)
    updater = Updater(config=config, policy=policy, world=world, stop=StopFlag(), run_path=findings.work)
    findings.add(load_s=time.perf_counter() - start)
    lengths = {"prompt": min(512, shape.longest // 4), "shortest": shape.longest // 2, "longest": shape.longest}
    batch = make_batch(4, shape.vocab, **lengths)
    for _ in range(STEPS_TO_MEASURE + 1):  # the last one is the first with kept activations
        updater.run(batch)
    wait(world)
    start = time.perf_counter()
    reports = [updater.run(batch) for _ in range(2)]
    wait(world)
    seconds = (time.perf_counter() - start) / len(reports)
    use = reports[-1].utilization
    findings.add(
        response_tokens_per_s=reports[-1].num_tokens / seconds,
        step_s=seconds,
        tflops=use.tflops_per_s,
        gpu_s={name: round(value, 3) for name, value in use.gpu_seconds.items()},
        peak_gb=peak_gb(world),
    )
    findings.add(mfu_update=use.mfu_update)
    if use.mfu is not None and is_goal:
        findings.goal("mfu", use.mfu, at_least=GOAL_MFU)
    else:
        findings.add(mfu=use.mfu)
    if world.device.type == "cuda":
        # One micro-batch: the events of a whole batch take minutes to sum up.
        group = make_batch(1, shape.vocab, prompt=512, shortest=shape.longest // 8, longest=shape.longest // 4)
        findings.add(kernels=_kernels(lambda: updater.run(group)))


def _kernels(action: Callable[[], Any]) -> list[tuple[str, float]]:
    """The kernels that take longest, with their seconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        action()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    return [(event.key[:120], event.self_device_time_total / 1e6) for event in events[:NUM_KERNELS]]


def peak_gb(world: World) -> float:
    """Most memory so far: allocated on the GPU, or resident in this process."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated(world.device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
