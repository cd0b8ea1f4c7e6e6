"""TRL's updates on given responses: run in TRL's own environment by tests/full/test_peer_updates.py.

    python tests/support/peers/trl_updates.py WORK.json RESULT.json

WORK: model, learning rate, and per step a list of groups, each {prompt, completions, rewards} in token ids. RESULT: the
rate and the gradient norm of every step; the trained weights are written to the folder that WORK names.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    groups = [group for step in work["steps"] for group in step]
    num_rows = sum(len(group["completions"]) for group in work["steps"][0])

    def rollout(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        """The given responses: a prompt's text is the number of its group, once per response."""
        seen: dict[str, int] = {}
        rows = []
        for text in prompts:
            seen[text] = seen.get(text, -1) + 1
            group = groups[int(text)]
            rows.append((group["prompt"], group["completions"][seen[text]], group["rewards"][seen[text]]))
        prompt_ids, completion_ids, rewards = (list(column) for column in zip(*rows, strict=True))
        logprobs = [[0.0] * len(ids) for ids in completion_ids]  # unused without vLLM
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs, "given": rewards}

    def reward(given: list[float], **_: Any) -> list[float]:
        return given

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=work["model"],
            processing_class=AutoTokenizer.from_pretrained(work["model"]),
            reward_funcs=[reward],
            args=GRPOConfig(
                output_dir=folder, max_steps=len(work["steps"]), per_device_train_batch_size=num_rows,
                learning_rate=work["lr"], shuffle_dataset=False, use_cpu=True, bf16=False,
                gradient_checkpointing=False, save_strategy="no", logging_steps=1, disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": [str(number) for number in range(len(groups))]}),
            rollout_func=rollout,
        )  # fmt: skip
        trainer.train()
        trainer.model.save_pretrained(work["trained"])
    rows = [row for row in trainer.state.log_history if "grad_norm" in row]
    result = {"lr": [row["learning_rate"] for row in rows], "grad_norm": [row["grad_norm"] for row in rows]}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
