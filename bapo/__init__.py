"""What the parts of BAPO share: values and their bytes, rules of the papers, settings, tasks, run directory, clients of
the services; and the `bapo` command.

BAPO = Batch Adaptation Policy Optimization (Wan et al., ICLR 2026, arXiv 2602.20722).
Nothing here imports torch, transformers, vllm, ray or fastapi: a contract in pyproject.toml. `bapo.train` and
`bapo.Run` (bapo/run.py) are imported when they are used.
"""

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ("Run", "reward", "train")
__version__ = "0.1.0"

TAKES_COLUMNS = "bapo_takes_columns"
Function = TypeVar("Function", bound=Callable[..., Any])


def reward(function: Function) -> Function:
    """Mark `function(completion, answer, **row) -> float | None` as a reward that takes a row's columns by name.

    Example: `task.reward = "my_rewards.py:exact"`, with

        @bapo.reward
        def exact(completion: str, answer: str, **row) -> float:
            return float(completion.strip() == answer)
    """
    setattr(function, TAKES_COLUMNS, True)
    return function


def __getattr__(name: str) -> Any:
    if name not in ("Run", "train"):
        raise AttributeError(f"module 'bapo' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.run"), name)
