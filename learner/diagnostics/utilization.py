"""GPU time of a step, and how well the step uses the GPU: useful floating-point operations over that time.

    TFLOP/s of a rank = useful FLOPs of the step / ranks / GPU seconds of prox and update / 1e12
    MFU               = TFLOP/s / peak of the GPU in bfloat16
    MFU of the update = the same over the GPU seconds of update alone, without those of the proximal log-probs

Useful is what one forward and one backward pass over the trained responses and their prompts need, a prompt once per
group. Recomputed activations, proximal log-probs, a reference and a critic take time, but do not count.

    decoder layers   6 FLOPs per weight and token, 4 for a frozen one; of a layer with experts only those that a token
                     uses
    attention        12 x heads x head size per layer and attended position
    head             6 x hidden size x vocabulary per response token, 4 for a frozen one

Not counted: a vision tower. Overestimated: attention with a sliding window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from bapo.runtime.metrics.learner import GPU_PHASES
from learner.batch.columns import Columns, Int64s
from learner.distributed.world import World
from learner.model.policy import Policy

PEAK_TFLOPS: Mapping[str, float] = {
    "A100": 312, "A10": 125, "H100": 989, "H100 PCIe": 756, "H100 NVL": 835, "H200": 989, "H800": 989, "GH200": 989,
    "H20": 148, "B200": 2250, "GB200": 2500, "L40S": 362, "L4": 121, "RTX 4090": 165,
}  # fmt: skip
"""Words of a GPU's name -> dense peak in bfloat16 by its data sheet, TFLOP/s."""


class GpuEvent(Protocol):
    """The interface of `torch.cuda.Event` used here."""

    def record(self) -> None:
        """Queue the event in the current stream."""
        ...

    def synchronize(self) -> None:
        """Wait until the GPU has reached it."""
        ...

    def elapsed_time(self, end: GpuEvent, /) -> float:
        """Milliseconds from this event to `end`."""
        ...


def gpu_events(device: torch.device) -> Callable[[], GpuEvent] | None:
    """Creates events that keep the time of this device; None for a CPU."""
    if device.type != "cuda":
        return None
    return lambda: cast(GpuEvent, torch.cuda.Event(enable_timing=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilization:
    """One step of this rank."""

    gpu_seconds: Mapping[str, float]
    """By phase; empty on a CPU."""
    tflops_per_s: float | None
    """Useful TFLOP/s; on a CPU over the host's seconds. None without a trained response."""
    mfu: float | None
    """None on a CPU, and on a GPU that is not in `PEAK_TFLOPS`."""
    mfu_update: float | None
    """The same without the phase prox: of a method that needs no proximal log-probs."""

    @property
    def fields(self) -> dict[str, float | None]:
        """Of a row of metrics.jsonl."""
        seconds = {f"{name}_gpu_s": self.gpu_seconds.get(name) for name in GPU_PHASES}
        return {**seconds, "tflops_per_s": self.tflops_per_s, "mfu": self.mfu, "mfu_update": self.mfu_update}


UNKNOWN = Utilization(gpu_seconds={}, tflops_per_s=None, mfu=None, mfu_update=None)
"""Of a step without an update."""


def utilization(
    flops: float, seconds: Mapping[str, float], gpu_seconds: Mapping[str, float], world: World
) -> Utilization:
    """Of a step with this many useful FLOPs over all ranks.

    Args:
        seconds: of its phases, by the host's clock; gpu_seconds: by the GPU's, empty on a CPU.
    """
    spent = gpu_seconds or seconds
    rate = _rate(flops / world.size, sum(spent.get(name, 0.0) for name in GPU_PHASES))
    alone = _rate(flops / world.size, spent.get("update", 0.0))
    peak = peak_tflops(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None
    return Utilization(
        gpu_seconds=gpu_seconds,
        tflops_per_s=rate,
        mfu=rate / peak if rate and peak else None,
        mfu_update=alone / peak if alone and peak else None,
    )


def _rate(flops: float, seconds: float) -> float | None:
    return flops / seconds / 1e12 if flops and seconds else None


def peak_tflops(name: str) -> float | None:
    """Dense bfloat16 peak of a GPU, by its name as CUDA reports it; None if unknown."""
    words = set(name.replace("-", " ").split())
    matches = [key for key in PEAK_TFLOPS if words >= set(key.split())]
    return PEAK_TFLOPS[max(matches, key=len)] if matches else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """FLOPs of a forward and backward pass, by what causes them."""

    per_token: float
    per_attended: float
    """Per pair of a token and a position that it attends to."""
    per_prediction: float

    def of(self, columns: Columns, responses: Int64s) -> float:
        """Over these responses and the prompts of their groups."""
        groups = columns.group_R[responses]
        prompt_E = np.array([len(columns.prompts_E[group]) for group in np.unique(groups)], dtype=np.float64)
        before_S, computed_S = _turns(columns, responses)
        tokens = prompt_E.sum() + computed_S.sum()
        attended = (prompt_E * (prompt_E + 1) / 2).sum() + (computed_S * (before_S + (computed_S + 1) / 2)).sum()
        predictions = float(columns.lengths_R[responses].sum())
        return float(tokens * self.per_token + attended * self.per_attended + predictions * self.per_prediction)


def _turns(columns: Columns, responses: Int64s) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[S], [S]: tokens before each turn of these responses, and tokens of the turn that a pass computes."""
    before, computed = [np.zeros(0)], [np.zeros(0)]
    for response in responses.tolist():
        turns = columns.turns_of(response)
        before.append(turns.offsets(len(columns.prompts_E[columns.group_R[response]])).astype(np.float64))
        computed.append(turns.num_computed.astype(np.float64))
    return np.concatenate(before), np.concatenate(computed)


def model_flops(policy: Policy) -> ModelFlops:
    """Counted from the weights of the decoder, which may be sharded, and the model's configuration."""
    settings = policy.model.config.get_text_config()
    decoder = policy.model.get_decoder()  # without a vision tower
    embeddings = decoder.get_input_embeddings().weight
    used = getattr(settings, "num_experts_per_tok", None) or 1
    per_token = 0.0
    for parameter in decoder.parameters():
        if parameter.ndim == 2 and parameter is not embeddings:
            per_token += _passes(parameter) * parameter.numel()
        elif parameter.ndim == 3:  # [experts, out, in]
            per_token += _passes(parameter) * parameter.numel() * used / parameter.shape[0]
    heads = settings.num_attention_heads
    head_size = getattr(settings, "head_dim", None) or settings.hidden_size // heads
    return ModelFlops(
        per_token=per_token,
        per_attended=12.0 * settings.num_hidden_layers * heads * head_size,
        per_prediction=_passes(policy.model.get_output_embeddings().weight)
        * settings.hidden_size
        * settings.vocab_size,
    )


def _passes(parameter: torch.nn.Parameter) -> float:
    """FLOPs per weight and token: two each for the output, the gradient of the input, and that of the weight."""
    return 6.0 if parameter.requires_grad else 4.0
