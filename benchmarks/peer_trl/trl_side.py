"""TRL's GRPOTrainer on the shipped model and Countdown: the peer's side of the comparison.

    python -m benchmarks.peer_trl.trl_side --steps 100 [--device cuda] --out trl.json

Runs in an environment of its own (benchmarks/peer_trl/requirements.txt) and writes one JSON object: seconds from
the process start to the first step, seconds of every step, rewards of every step.

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

from bapo.tasks.countdown import make_task

GROUP_SIZE = 8
PROMPTS_PER_STEP = 32
UPDATES_PER_STEP = 4


class StepClock(TrainerCallback):
    """Wall time at the end of every generation step (four optimizer steps)."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.rewards: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % UPDATES_PER_STEP == 0:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/countdown-tiny")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    started = psutil.Process().create_time()
    torch.set_num_threads(args.threads)

    task = make_task(num_train=2000)
    by_text = {prompt.text: prompt for prompt in task.prompts("train")}
    tokenizer = AutoTokenizer.from_pretrained(args.model)

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [task.reward(by_text[p], c) for p, c in zip(prompts, completions, strict=True)]

    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=args.model,
            processing_class=tokenizer,
            reward_funcs=[reward],
            args=config(args.steps, folder, args.max_tokens, args.lr, is_cuda=args.device == "cuda"),
            train_dataset=Dataset.from_dict({"prompt": list(by_text)}),
            callbacks=[clock],
        )
        train_started = time.time()
        trainer.train()
    result = {
        "system": "trl",
        "responses_per_step": PROMPTS_PER_STEP * GROUP_SIZE,
        "start_s": train_started - started,
        "total_s": time.time() - started,
        "step_ends": [moment - started for moment in clock.times],
        "rewards": clock.rewards,
    }
    args.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
