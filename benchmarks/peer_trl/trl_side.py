"""TRL's GRPOTrainer on the shipped model and Countdown: the peer's side of the comparison.

    python -m benchmarks.peer_trl.trl_side --steps 100 [--device cuda] --out trl.json
    python -m benchmarks.peer_trl.trl_side --steps 50 --prompts prompts.json --seed 1 --lr 3e-4 --out trl.json

Runs in an environment of its own (benchmarks/peer_trl/requirements.txt) and writes one JSON object: seconds from
the process start to the first step, seconds of every step, rewards of every step.

With --prompts: GRPOConfig as it is, except for sizes, rate and precision (float32), on these prompts in this order; for
benchmarks/peer_trl/curves.py. Without: the work of benchmarks/peer_trl/__main__.py.

On a GPU: bfloat16 and vLLM in the trainer's process (`vllm_mode="colocate"`). TRL's asynchronous trainer needs a second
GPU for its vLLM server.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bapo.tasks.countdown import CountdownOptions, CountdownTask

GROUP_SIZE = 8
PROMPTS_PER_STEP = 32
UPDATES_PER_STEP = 4


class StepClock(TrainerCallback):
    """Wall time at the end of every generation step (four optimizer steps)."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.rewards: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % args.steps_per_generation == 0:
            self.times.append(time.time())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "reward" in logs:
            self.rewards.append(logs["reward"])


def config(steps: int, folder: str, max_tokens: int, lr: float, *, is_cuda: bool) -> GRPOConfig:
    """The same work per step as our `grpo` side: 32 prompts x 8, 4 updates."""
    engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4} if is_cuda else {}
    return GRPOConfig(
        output_dir=folder,
        max_steps=steps * UPDATES_PER_STEP,
        per_device_train_batch_size=PROMPTS_PER_STEP * GROUP_SIZE // UPDATES_PER_STEP,
        steps_per_generation=UPDATES_PER_STEP,
        num_generations=GROUP_SIZE,
        max_completion_length=max_tokens,
        learning_rate=lr,
        lr_scheduler_type="constant",
        beta=0.0,
        loss_type="grpo",
        temperature=1.0,
        use_cpu=not is_cuda,
        bf16=is_cuda,
        fp16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=UPDATES_PER_STEP,
        disable_tqdm=True,
        seed=0,
        **engine,
    )


def defaults(steps: int, folder: str, max_tokens: int, lr: float, *, num_responses: int, seed: int) -> GRPOConfig:
    """TRL's own settings: one update per batch, a rate that decreases linearly, loss_type "dapo"."""
    return GRPOConfig(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=num_responses,
        num_generations=GROUP_SIZE,
        max_completion_length=max_tokens,
        learning_rate=lr,
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=seed,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/countdown-tiny")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--prompts", type=Path, help="JSON list of the prompts of all steps, in order")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    started = psutil.Process().create_time()
    torch.set_num_threads(args.threads)

    task = CountdownTask(CountdownOptions(num_train=2000))
    by_text = {prompt.text: prompt for prompt in task.prompts("train")}
    tokenizer = AutoTokenizer.from_pretrained(args.model)

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [task.reward(by_text[p], c) for p, c in zip(prompts, completions, strict=True)]

    clock = StepClock()
    prompts = json.loads(args.prompts.read_text()) if args.prompts else list(by_text)
    with tempfile.TemporaryDirectory() as folder:
        settings = (
            defaults(
                args.steps, folder, args.max_tokens, args.lr, seed=args.seed,
                num_responses=len(prompts) // args.steps * GROUP_SIZE,
            )
            if args.prompts
            else config(args.steps, folder, args.max_tokens, args.lr, is_cuda=args.device == "cuda")
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=args.model,
            processing_class=tokenizer,
            reward_funcs=[reward],
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            callbacks=[clock],
        )
        train_started = time.time()
        trainer.train()
    result = {
        "system": "trl",
        "responses_per_step": settings.per_device_train_batch_size * settings.steps_per_generation,
        "start_s": train_started - started,
        "total_s": time.time() - started,
        "step_ends": [moment - started for moment in clock.times],
        "rewards": clock.rewards,
    }
    args.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
