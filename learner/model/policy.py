"""pi_theta: a transformers causal LM that computes log-probs of packed response tokens.

Trained parameters are always float32, so that small optimizer steps are not rounded away. With model.dtype = bfloat16
FSDP gathers them in bfloat16, layer by layer, on one or several ranks, and the whole pass is in bfloat16 except sums
over the vocabulary; gradients reach the optimizer in float32.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from learner.batch.packed_attention import NAME as PACKED
from learner.batch.packed_attention import pack_rows
from learner.batch.packing import MicroBatch, rows_of
from learner.distributed.world import World
from learner.model.loading import checkpoints_activations, load_module
from learner.model.logprobs import response_logprobs

log = logging.getLogger(__name__)

HEAD_TOLERANCE = 1e-3
"""Tolerance in nats against the model's own log-probs in float32; a wrong head differs by much more."""


class Policy(nn.Module):
    """A transformers causal LM with packed attention and a chunked head. Always in eval mode: no dropout."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float = 1.0,
        chunk_tokens: int = 1024,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.model: PreTrainedModel = model
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        self.dtype = dtype

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device

    def forward(self, micro: MicroBatch, temperature: float | None = None) -> tuple[Tensor, Tensor]:
        """log pi(y_t | .) and entropy, both [M] float32, for the response tokens of one micro-batch.

        Args:
            temperature: of the distribution; default: that of the rollouts.
        """
        output = self.model.base_model(
            input_ids=micro.token_ids_N.unsqueeze(0),
            position_ids=micro.positions_N.unsqueeze(0),
            use_cache=False,
            packing=micro.packing,
        )
        hidden_MD = output.last_hidden_state[0].index_select(0, micro.predict_M)
        return response_logprobs(
            hidden_MD,
            self.model.get_output_embeddings().weight,
            micro.target_M,
            temperature=self.temperature if temperature is None else temperature,
            chunk_tokens=self.chunk_tokens,
            compute_dtype=self.dtype,
        )


def load_policy(path: str | Path, config: Config, world: World, *, frozen: bool = False) -> Policy:
    """Load a model in Hugging Face format (folder or hub id) over all ranks, ready to train. Collective.

    Args:
        frozen: without gradients, as for pi_ref.
    Raises: ConfigError if it is missing or not a supported causal LM.
    """
    dtype = getattr(torch, config.model.dtype)
    generation: list[GenerationConfig] = []

    def read() -> Policy:
        try:
            model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32, attn_implementation=PACKED)
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error
        generation.append(model.generation_config)
        return wrapped(model)

    def build() -> Policy:
        try:
            settings = AutoConfig.from_pretrained(str(path))
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32, attn_implementation=PACKED)
        for found in generation:  # on rank 0, which writes it into checkpoints
            model.generation_config = found
        return wrapped(model)

    def wrapped(model: PreTrainedModel) -> Policy:
        return Policy(
            model,
            temperature=config.rollout.temperature,
            chunk_tokens=config.learner.logprob_chunk_tokens,
            dtype=dtype,
        )

    return load_module(
        read,
        build,
        world=world,
        dtype=dtype,
        check=lambda policy: check_head(policy, path),
        recompute=not frozen and checkpoints_activations(config.learner.gradient_checkpointing, world.device),
        frozen=frozen,
    )


def _unreadable(path: str | Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"model.path={path}: cannot be loaded as a causal LM: {error}; set it to a folder with config.json and "
        "safetensors, or to the id of a model in the local Hugging Face cache"
    )


def sequence_microbatch(token_ids: tuple[int, ...], device: torch.device) -> MicroBatch:
    """One sequence in which all tokens except the first are response tokens."""
    places = np.arange(len(token_ids) - 1)
    ids, places_N = torch.tensor(token_ids, device=device), torch.from_numpy(places).to(device)
    return MicroBatch(
        token_ids_N=ids[:-1],
        positions_N=places_N,
        packing=pack_rows([places], len(places), device),
        predict_M=places_N,
        target_M=ids[1:],
        slot_M=places_N,
        rows=rows_of(np.array([len(places)]), device),
    )


@torch.no_grad()
def check_head(policy: Policy, path: str | Path) -> None:
    """Compare the packed log-probs of a few tokens with the model's own forward pass.

    Some architectures scale or cap logits after the head, or have special attention; they are rejected here instead
    of being trained on wrong log-probs.
    """
    model, dtype = policy.model, policy.dtype
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise ConfigError(f"model.path={path}: the learner needs a linear output head without bias")
    token_ids = tuple(range(1, min(9, model.config.vocab_size)))
    policy.dtype = torch.float32
    ours, _ = policy(sequence_microbatch(token_ids, policy.device), temperature=1.0)
    policy.dtype = dtype
    model.set_attn_implementation("sdpa")
    inputs = torch.tensor([token_ids], device=policy.device)
    theirs = model(input_ids=inputs, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    model.set_attn_implementation(PACKED)
    gap = (ours - theirs.gather(1, inputs[0, 1:, None]).squeeze(1)).abs().max().item()
    if not gap <= HEAD_TOLERANCE:
        raise ConfigError(
            f"model.path={path}: log-probs of the packed forward pass differ by {gap:.2g} nats from the model's own; "
            f"{type(model).__name__} is not supported"
        )
    log.info("policy %s parameters=%d parity=%.1e", path, sum(p.numel() for p in model.parameters()), gap)
