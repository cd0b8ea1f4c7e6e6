"""Rows of metrics.jsonl and evaluations.jsonl, as a run writes them."""

from __future__ import annotations

from typing import Any


def make_row(step: int, **fields: Any) -> dict[str, Any]:
    row = {
        "step": step, "reward_mean": 0.25, "x1": 18, "x2": 2, "x3": 6, "num_bad": 31, "num_high": 44,
        "staleness_x1_max": 2, "staleness_x2_max": 0, "staleness_x3_max": 4, "tokens_per_s": 3912.0, "step_s": 1.83,
        "wait_batch_s": 0.71, "time": 1000.0 + 2 * step, "batch_size": 32, "num_updates": 4,
    }  # fmt: skip
    return row | fields


def make_evaluation(split: str, version: int, accuracy: float, **fields: Any) -> dict[str, Any]:
    row = {
        "split": split, "version": version, "step": version - 1, "accuracy": accuracy, "low": accuracy - 0.02,
        "high": accuracy + 0.02, "num_prompts": 200, "num_samples": 2, "truncated_share": 0.25, "mean_tokens": 60.0,
        "seconds": 20.0, "rewards": {},
    }  # fmt: skip
    return row | fields


def easy_first(**fields: Any) -> list[dict[str, Any]]:
    """A split whose easy prompts come first, of which fewer are measured later. By hand: the base model has 5 of 8
    responses correct, 62.5 %, and pass@2 75 %; of p and q all, and later 3 of 4: 75 %, and 37.5 % as compared with it.
    Both still have a correct response: pass@2 stays."""
    base = {"p": [1.0, 1.0], "q": [1.0, 1.0], "r": [1.0, 0.0], "s": [0.0, 0.0]}
    later = {"p": [1.0, 1.0], "q": [1.0, 0.0]}
    return [
        make_evaluation("easy", 1, 0.625, num_prompts=4, rewards=base, **fields),
        make_evaluation("easy", 5, 0.75, num_prompts=2, rewards=later, **fields),
    ]
