"""Make a torchvision built for CUDA importable with a CPU build of torch, as installed from PyPI and its mirrors.

Its C++ operators do not load there, so importing it fails, and with it every model of transformers: it registers shapes
for operators that do not exist. They are never called here, so declaring them is enough. If the builds match, or
without torchvision, nothing happens.

Call it before the first import of transformers or vLLM in a process.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

OPERATORS = ("nms", "qnms")
"""Operators whose shapes torchvision registers when it is imported."""


@cache
def complete_torchvision() -> Any:
    """Declare the operators that a torchvision of another build is missing.

    Returns: the declarations, which must stay alive; None if nothing is missing.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or importlib.util.find_spec("torch") is None:
        return None
    torch = importlib.import_module("torch")  # by name: the shared package is light
    try:
        torch.ops.load_library(Path(spec.origin).with_name("_C.so"))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in OPERATORS:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None
