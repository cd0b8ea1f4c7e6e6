"""Publishing weights, checkpoints and resuming: seconds for which the learner is blocked, and GB/s."""

from __future__ import annotations

import time

import torch

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.learner import wait
from benchmarks.gpu.models import SHAPES, learner_config, world_of, write_model
from benchmarks.learner_throughput import make_batch
from learner.distributed.sharding import whole
from learner.startup import newest_checkpoint


def weights(findings: Findings, device: str, *, model: str) -> None:
    """The learner as a run creates it, with a fleet that acknowledges at once; the second publish is measured."""
    from tests.support.learner import FakeBuffer, FakeFleet, make_test_learner

    world, shape, folder = world_of(device), SHAPES[model], findings.work / "model"
    write_model(folder, shape, world)
    config = learner_config(folder, world, shape, dtype="bfloat16", num_groups=2)
    batch, fleet, run = make_batch(2, shape.vocab), FakeFleet(), findings.work / "run"
    buffer = FakeBuffer(lambda step: batch)
    learner = make_test_learner(config, run, buffer=buffer, fleet=fleet, world=world)
    for version in (1, 2):
        learner.updater.run(batch)
        wait(world)
        start = time.perf_counter()
        learner.publisher.publish(version)
        blocked_s = time.perf_counter() - start
        learner.publisher.wait()
        total_s = time.perf_counter() - start
        phases_s = learner.publisher.take_seconds()
    num_bytes = fleet.updates[-1].num_bytes
    findings.add(
        publish_s=total_s,
        publish_blocked_s=blocked_s,
        publish_gb_s=num_bytes / total_s / 1e9,
        publish_gb=num_bytes / 1e9,
        phases_s={name: round(value, 3) for name, value in phases_s.items()},
    )
    start = time.perf_counter()
    learner.save_checkpoint(1)
    blocked_s = time.perf_counter() - start
    learner.finish_checkpoint(wait=True)
    written_s = time.perf_counter() - start
    newest = newest_checkpoint(run / "checkpoints")
    assert newest is not None, "it has just been written"
    num_bytes = sum(file.stat().st_size for file in newest.folder.rglob("*") if file.is_file())
    findings.add(
        checkpoint_s=blocked_s,
        checkpoint_written_s=written_s,
        checkpoint_gb=num_bytes / 1e9,
        checkpoint_gb_s=num_bytes / written_s / 1e9,
    )

    saved = [whole(parameter).cpu() for parameter in learner.policy.parameters()]
    del learner
    start = time.perf_counter()
    resumed = make_test_learner(config, run, buffer=buffer, fleet=fleet, resume=True, world=world)
    newest.load(resumed.updater)
    findings.add(resume_s=time.perf_counter() - start)
    pairs = zip(saved, resumed.policy.parameters(), strict=True)
    findings.require(
        "resumed_bits_differ", sum(not torch.equal(one, whole(other).cpu()) for one, other in pairs), at_most=0
    )
