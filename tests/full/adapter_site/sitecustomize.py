"""Python imports this first where this folder is in PYTHONPATH: engines that merge an adapter wrongly, without a word.

BAPO_TEST_ADAPTER names the fault.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

Tensors = Callable[..., Iterator[tuple[str, Any]]]


def without_one_layer(tensors: Tensors) -> Tensors:
    def found(*arguments: Any) -> Iterator[tuple[str, Any]]:
        return (each for each in tensors(*arguments) if not each[0].startswith("model.layers.0.mlp.down_proj"))

    return found


def of_the_first_update(tensors: Tensors) -> Tensors:
    first: list[tuple[str, Any]] = []

    def found(*arguments: Any) -> Iterator[tuple[str, Any]]:
        first.extend(() if first else tensors(*arguments))
        return iter(first)

    return found


if os.environ.get("BAPO_TEST_ADAPTER") and any(word.endswith("default_worker.py") for word in sys.orig_argv):
    from bapo.runtime import adapter_file

    merged, tensors = adapter_file.merged, adapter_file.Adapter.tensors
    fault = os.environ["BAPO_TEST_ADAPTER"]
    if fault == "frozen base":
        adapter_file.merged = lambda weight, *_: weight
    elif fault == "twice the scale":
        adapter_file.merged = lambda weight, a, b, scale: merged(weight, a, b, 2 * scale)
    elif fault == "a layer missing":
        adapter_file.Adapter.tensors = without_one_layer(tensors)  # type: ignore[method-assign]
    elif fault == "old adapter":
        adapter_file.Adapter.tensors = of_the_first_update(tensors)  # type: ignore[method-assign]
