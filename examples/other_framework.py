"""The buffer service with your own training loop: TRL, verl, or 35 lines of Python as here.

    bapo up buffer --run outputs/mine --algorithm.batch_size 16
    export BAPO_TOKEN_FILE=outputs/mine/tokens/operator/token
    python examples/other_framework.py http://127.0.0.1:8700 20

Kill it or the service at any time and start it again: it continues after the last committed step.
"""

import sys

import numpy as np

from bapo.core.codec import pack_group
from bapo.core.types import Group, Progress, Prompt, Purpose, RolloutRequest, Timing
from bapo.transport.buffer_client import BufferClient

B, G = 16, 8  # groups per batch, as algorithm.batch_size says, and responses per group
PROMPTS = [Prompt(prompt_id=f"p{i}", text=f"{i}+{i}=", task="sums", answer={"sum": 2 * i}) for i in range(256)]


def requests(step: int, purpose: Purpose, prompts: list[Prompt]) -> list[RolloutRequest]:
    return [RolloutRequest(request_id=f"{purpose}-{step:05}-{i:03}", prompt=prompt, group_size=G, purpose=purpose,
                           step=step, min_version=step) for i, prompt in enumerate(prompts)]  # fmt: skip


def sample(request: RolloutRequest, version: int) -> Group:
    """Your engine and your reward: G responses with the log-probs of their tokens, and their rewards."""
    number = int(request.prompt.prompt_id[1:])
    rng = np.random.default_rng([number, version])
    lengths = rng.integers(4, 32, G, dtype=np.int32)
    return Group(
        group_id=request.request_id, prompt=request.prompt, purpose=request.purpose, step=request.step,
        label=request.label, worker_id="worker-0", prompt_token_ids=np.arange(4, dtype=np.int32),
        token_ids=rng.integers(0, 1000, lengths.sum(), dtype=np.int32),
        rollout_logprobs=rng.uniform(-3, 0, lengths.sum()).astype(np.float32), lengths=lengths,
        rewards=(rng.random(G) < number / 256 + version / 100).astype(np.float32), outcomes=np.zeros(G, np.uint8),
        versions=np.full((G, 2), version, np.int32), timing=Timing(claimed_at=0.0, sample_s=0.1, grade_s=0.0),
    )  # fmt: skip


# Here one process is scheduler, worker and learner; each may be one process or many.
buffer = BufferClient(sys.argv[1])
buffer.release("worker-0")  # leases of a killed process return to the queue
for step in range(buffer.status().committed_step + 1, int(sys.argv[2]) + 1):
    buffer.report_progress(Progress(step=step, policy_version=step))
    buffer.enqueue(requests(step, Purpose.FRESH, [PROMPTS[(step * B + i) % 256] for i in range(B)]))
    buffer.reevaluate(step, requests(step, Purpose.REEVALUATE, [prompt for _, prompt in buffer.hard_prompts()]))
    while claimed := buffer.claim("worker-0", limit=64, policy_version=step):
        buffer.push([pack_group(sample(request, step)) for request in claimed])
    batch = buffer.batch(step, timeout_s=60.0)
    origins = [entry.origin for entry in batch.entries]  # your optimizer step over batch.entries comes here
    parts = "  ".join(f"{name} {origins.count(name):2}" for name in ("x1", "x2", "x3"))
    print(f"step {step:3}  {parts}  reward {batch.r_tot:.3f}  hard prompts {batch.facts['num_bad']}")
    buffer.commit(step, checkpointed=step)
