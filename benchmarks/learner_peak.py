"""Peak memory of a rank of the learner for models that no machine here can hold, and the table of docs/cluster.md.

    python -m benchmarks.learner_peak [--write]

The learner's own model code, sharding and recomputation run on fake tensors (torch's FakeTensorMode) as one of R ranks
of a fake process group, and torch's FSDPMemTracker adds up what is alive: two micro-batches, the second with the
gradients of the first. AdamW's moments are added: 8 bytes per parameter of the shard. Layers are alike, so the peak is
a straight line in their number, through those of 2 and 4 layers; `tests/full/test_learner_peak.py` checks this.

Not counted: fragmentation, NCCL's buffers and CUDA's context.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from bapo.config.tree import LoraConfig
from benchmarks.page_tables import print_or_write
from learner.batch.packed_attention import NAME as PACKED
from learner.distributed.sharding import shard
from learner.distributed.world import World
from learner.model import logprobs
from learner.model.layers import LayerOptions, prepare_layers
from learner.model.loading import cast_frozen
from learner.model.lora import add_adapters, trained_parameters
from learner.model.policy import Policy, sequence_microbatch

CPU = torch.device("cpu")
GIB = 1 << 30
MICROBATCH_TOKENS, CHUNK_TOKENS, PROMPT_TOKENS = 16_384, 1024, 512
RANKS = (8, 16, 32, 64)
FEW, MORE = 2, 4
"""Numbers of layers that run."""
PAGE = Path(__file__).parent.parent / "docs" / "cluster.md"
BEGIN = "<!-- python -m benchmarks.learner_peak --write -->"


@dataclass(frozen=True, slots=True)
class Shape:
    """A model without its weights."""

    name: str
    kind: type[PretrainedConfig]
    settings: dict[str, Any]

    @property
    def num_layers(self) -> int:
        """Decoder layers of the whole model."""
        return int(self.settings["num_hidden_layers"])

    def config(self, num_layers: int) -> PretrainedConfig:
        """The model with other layers."""
        return self.kind(**{**self.settings, "num_hidden_layers": num_layers})


def _shape(name: str, kind: type[PretrainedConfig], sizes: tuple[int, ...]) -> Shape:
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    shared = {"num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False}
    return Shape(name, kind, {**dict(zip(names, sizes, strict=True)), **shared, "max_position_embeddings": 32_768})


SHAPES = (
    _shape("Qwen3-8B", Qwen3Config, (36, 4096, 12_288, 32, 151_936)),
    _shape("Qwen3-32B", Qwen3Config, (64, 5120, 25_600, 64, 151_936)),
    _shape("Llama-3-70B", LlamaConfig, (80, 8192, 28_672, 64, 128_256)),
)


def peak_bytes(
    shape: Shape,
    num_ranks: int,
    *,
    recompute: bool = True,
    tokens: int = MICROBATCH_TOKENS,
    lora: LoraConfig | None = None,
) -> float:
    """Of a rank that trains the model, or an adapter, in bfloat16, by the line through two small models."""
    few, more = (
        traced_bytes(shape, num_layers, num_ranks, recompute=recompute, tokens=tokens, lora=lora)
        for num_layers in (FEW, MORE)
    )
    return few + (more - few) * (shape.num_layers - FEW) / (MORE - FEW)


def traced_bytes(
    shape: Shape, num_layers: int, num_ranks: int, *, recompute: bool, tokens: int, lora: LoraConfig | None = None
) -> int:
    """Of a rank, traced with this number of layers."""
    with _ranks(num_ranks) as world, _products_of_cuda(), FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(
            shape.config(num_layers), dtype=torch.float32, attn_implementation=PACKED
        )
        if lora is not None:
            add_adapters(model, lora, seed=0, base=shape.name)
            cast_frozen(model, torch.bfloat16)
        policy = Policy(model, chunk_tokens=CHUNK_TOKENS, dtype=torch.bfloat16).eval()
        prepare_layers(policy, LayerOptions(recompute=recompute))
        shard(policy, world, torch.bfloat16)
        micro = sequence_microbatch([0] * (tokens + 1), CPU, num_prompt=PROMPT_TOKENS)
        tracker = FSDPMemTracker(policy)
        with tracker:
            for _ in range(2):
                policy(micro)[0].sum().backward()
                tracker.reset_mod_stats()
        moments = sum(8 * parameter.to_local().numel() for parameter in trained_parameters(policy))  # type: ignore[attr-defined]
        return int(tracker.get_tracker_snapshot("peak")[CPU]["Total"]) + moments


@contextmanager
def _ranks(num_ranks: int) -> Iterator[World]:
    """Rank 0 of this many, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield World(rank=0, size=num_ranks, device=CPU, mesh=init_device_mesh("cpu", (num_ranks,)))
    finally:
        dist.destroy_process_group()


@contextmanager
def _products_of_cuda() -> Iterator[None]:
    """The head's products as on CUDA: on the CPU they have copies of their inputs in float32."""
    plain = logprobs._exact_product

    def product(left_NK: Tensor, right_MK: Tensor) -> Tensor:
        return torch.mm(left_NK, right_MK.T, out_dtype=torch.float32)

    logprobs._exact_product = product
    try:
        yield
    finally:
        logprobs._exact_product = plain


def table() -> str:
    """The table in Markdown, GiB."""
    lines = [
        f"| GiB per rank | {' | '.join(f'{ranks} ranks' for ranks in RANKS)} | activations that a layer would keep |",
        f"|---|{'---|' * (len(RANKS) + 1)}",
    ]
    for shape in SHAPES:
        peaks = [peak_bytes(shape, ranks) / GIB for ranks in RANKS]
        kept = (peak_bytes(shape, RANKS[0], recompute=False) / GIB - peaks[0]) / shape.num_layers
        lines.append(f"| {shape.name} | {' | '.join(f'{peak:.1f}' for peak in peaks)} | {kept:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print_or_write(table, PAGE, BEGIN, __doc__)
