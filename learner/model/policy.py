"""pi_theta: a transformers causal LM, with or without images, that computes log-probs of packed response tokens.

Trained parameters are always float32, so that small optimizer steps are not rounded away. With model.dtype = bfloat16
FSDP gathers them in bfloat16, layer by layer, on one or several ranks, and the whole pass is in bfloat16 except sums
over the vocabulary; gradients reach the optimizer in float32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.runtime.vision import Patches, VisionModel, vision_model
from learner.batch.microbatch import MicroBatch, PackedImages, build_texts, packed_images, rows_of
from learner.batch.packed_attention import pack_rows
from learner.distributed.world import World
from learner.model.backbone import (
    PLAIN,
    attention,
    freeze_vision,
    hidden_states,
    reads_images,
    refuse_changing_rope,
)
from learner.model.layers import LayerOptions
from learner.model.loading import cast_frozen, load_module
from learner.model.logprobs import response_logprobs
from learner.model.lora import add_adapters
from learner.model.peft_files import load_peft

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
        vision: VisionModel | None = None,
    ) -> None:
        """`vision`: image settings of a model that reads images."""
        super().__init__()
        self.model: PreTrainedModel = model
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        self.dtype = dtype
        self.vision = vision
        _compute_logprobs_in_head(model)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device

    def forward(
        self, micro: MicroBatch, temperature: float | None = None, *, with_entropy: bool = True
    ) -> tuple[Tensor, Tensor]:
        """log pi(y_t | .) and entropy, both [M] float32, for the response tokens of one micro-batch.

        Args:
            temperature: of the distribution; default: that of the rollouts.
            with_entropy: False: the entropy is NaN.
        """
        hidden_MD = hidden_states(self.model.base_model, micro).index_select(0, micro.predict_M)
        found: tuple[Tensor, Tensor] = self.model.get_output_embeddings()(
            hidden_MD,
            micro.target_M,
            temperature=self.temperature if temperature is None else temperature,
            chunk_tokens=self.chunk_tokens,
            compute_dtype=self.dtype,
            excluded=self._excluded(),
            with_entropy=with_entropy,
        )
        return found

    def logprobs(self, micro: MicroBatch) -> Tensor:
        """[M] log pi(y_t | .) alone."""
        found: Tensor = self(micro, with_entropy=False)[0]
        return found

    @property
    def sampled_tokens(self) -> list[int]:
        """Ids of the tokens that can be sampled, in order."""
        excluded = frozenset(self.vision.excluded if self.vision else ())
        vocab_size: int = self.model.config.get_text_config().vocab_size
        return [token for token in range(vocab_size) if token not in excluded]

    def _excluded(self) -> Tensor | None:
        return None if self.vision is None else torch.tensor(self.vision.excluded, device=self.device)


def _compute_logprobs_in_head(model: PreTrainedModel) -> None:
    """Replace the forward function of the output head, in place: with targets it computes their log-probs.

    So FSDP, whose hooks wrap the forward function, gathers the head's weight when it is used, not for the whole pass.
    """
    head = model.get_output_embeddings()
    if head is None or isinstance(head.forward, partial):
        return
    head.forward = partial(_head, head, head.forward)


def _head(
    head: nn.Linear, logits: Callable[[Tensor], Tensor], hidden: Tensor, target_M: Tensor | None = None, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    if target_M is None:
        return logits(hidden)
    return response_logprobs(hidden, head.weight, target_M, **options)


def load_policy(path: str | Path, config: Config, world: World, *, frozen: bool = False) -> Policy:
    """Load a model in Hugging Face format (folder or hub id) over all ranks, ready to train. Collective.

    Args:
        frozen: without gradients, as for pi_ref.
    Raises: ConfigError if it is missing or not a supported causal LM.
    """
    dtype = getattr(torch, config.model.dtype)
    vision = vision_model(config.model.path, config.model.max_image_pixels)
    generation: list[GenerationConfig] = []

    def read() -> Policy:
        try:
            settings = AutoConfig.from_pretrained(str(path))
            refuse_changing_rope(settings, config)
            model = _kind(settings).from_pretrained(
                str(path), dtype=torch.float32, attn_implementation=attention(settings)
            )
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error
        generation.append(model.generation_config)
        return wrapped(model, is_read=True)

    def build() -> Policy:
        try:
            settings = AutoConfig.from_pretrained(str(path))
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error
        kind = _kind(settings)
        model = kind.from_config(settings, dtype=torch.float32, attn_implementation=attention(settings))
        for found in generation:  # on rank 0, which writes it into checkpoints
            model.generation_config = found
        policy = wrapped(model)
        if config.model.lora is not None:
            cast_frozen(policy, dtype)
        return policy

    def wrapped(model: PreTrainedModel, *, is_read: bool = False) -> Policy:
        freeze_vision(model, config.model)
        if config.model.lora is not None and not frozen:
            add_adapters(model, config.model.lora, seed=config.run.seed, base=config.model.path)
            if config.model.adapter is not None and is_read:
                load_peft(model, config.model.lora, Path(config.model.adapter))
        return Policy(
            model,
            temperature=config.rollout.temperature,
            chunk_tokens=config.learner.logprob_chunk_tokens,
            dtype=dtype,
            vision=vision,
        )

    return load_module(
        read,
        build,
        world=world,
        dtype=dtype,
        check=lambda policy: check_head(policy, path, longest=config.rollout.longest_sequence - 1),
        layers=LayerOptions.of(
            config.learner,
            world.device,
            frozen=frozen,
            # Compiled code may round merged weights otherwise than the engines do.
            is_worth_compiling=not config.is_short and (config.model.lora is None or frozen),
        ),
        frozen=frozen,
    )


def empty_model(path: str) -> PreTrainedModel:
    """A model in Hugging Face format without its weights."""
    settings = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model: PreTrainedModel = _kind(settings).from_config(settings)
    return model


def _kind(settings: PreTrainedConfig) -> Any:
    """The transformers class that loads such a model with its output head."""
    return AutoModelForImageTextToText if reads_images(settings) else AutoModelForCausalLM


def _unreadable(path: str | Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"model.path={path}: cannot be loaded as a causal LM: {error}; set it to a folder with config.json and "
        "safetensors, or to the id of a model in the local Hugging Face cache"
    )


def sequence_microbatch(
    token_ids: Sequence[int],
    device: torch.device,
    *,
    num_prompt: int = 1,
    vision: VisionModel | None = None,
    pictures: Sequence[Patches] = (),
) -> MicroBatch:
    """One sequence in which all tokens after the prompt are response tokens.

    Args:
        vision, pictures: image settings and images, for a prompt with images.
    """
    places = np.arange(len(token_ids) - 1)
    ids, places_N = torch.tensor(token_ids, device=device), torch.from_numpy(places).to(device)
    positions = places if vision is None else vision.positions(np.array(token_ids[:-1]), pictures)
    return MicroBatch(
        token_ids_N=ids[:-1],
        positions_N=torch.from_numpy(positions).to(device),
        packing=pack_rows([places], len(places), device),
        predict_M=places_N[num_prompt - 1 :],
        target_M=ids[num_prompt:],
        slot_M=places_N[: len(places) - num_prompt + 1],
        rows=rows_of(np.array([len(places) - num_prompt + 1]), device),
        images=packed_images(pictures, device),
    )


@torch.no_grad()
def check_head(policy: Policy, path: str | Path, longest: int = 0) -> None:
    """Compare the log-probs of three packed sequences, two of them of one prompt, with the model's own of each.

    Some architectures scale or cap logits after the head, have special attention, or layers that read across packed
    sequences; they are rejected here instead of being trained on wrong log-probs.

    Args:
        longest: tokens of the longest sequence that the model will read, which none of its windows may cut.
    """
    model = policy.model
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise ConfigError(f"model.path={path}: the learner needs a linear output head without bias")
    ids = np.array(policy.sampled_tokens[1:9])
    groups = [(ids[:2], [ids[2:6], ids[4:]]), (ids[5:], [ids[:4]])]
    sequences = [(prompt, response) for prompt, responses in groups for response in responses]
    gaps_R = _gaps(policy, build_texts(groups, policy.device), sequences, longest)
    if not (gap := float(torch.cat([gaps_R[:1], _gap_of_picture(policy, ids, longest)]).max())) <= HEAD_TOLERANCE:
        raise ConfigError(
            f"model.path={path}: log-probs of the packed forward pass differ by {gap:.2g} nats from the model's own; "
            f"{type(model).__name__} is not supported"
        )
    if not (gap := float(gaps_R.max())) <= HEAD_TOLERANCE:
        raise ConfigError(
            f"model.path={path}: log-probs differ by {gap:.2g} nats with the sequences that are packed before: "
            f"{type(model).__name__} has layers that read across sequences (linear attention, state space, "
            "convolution), which is not supported; choose a model all of whose layers are attention"
        )
    log.info("policy %s parameters=%d parity=%.1e", path, sum(p.numel() for p in model.parameters()), gap)


def _gap_of_picture(policy: Policy, ids: NDArray[np.int64], longest: int) -> Tensor:
    """[1] `_gaps` of a sequence with an image; [0] if the model reads text only."""
    if policy.vision is None:
        return torch.empty(0, device=policy.device)
    picture = _noise(policy.vision)
    num = policy.vision.num_tokens(picture.height, picture.width)
    prompt = np.array([ids[0], *[policy.vision.image_token] * num])
    micro = sequence_microbatch(
        [*prompt, *ids], policy.device, num_prompt=len(prompt), vision=policy.vision, pictures=(picture,)
    )
    return _gaps(policy, micro, [(prompt, ids)], longest)


def _gaps(
    policy: Policy, micro: MicroBatch, sequences: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]], longest: int
) -> Tensor:
    """[R] maximum difference, in nats, between our log-probs of each response and the model's own.

    Args:
        sequences: prompt and response of each in the micro-batch.
    """
    model, dtype = policy.model, policy.dtype
    # As long as a sequence of the run, so that a layer with a shorter window is refused now.
    packing = replace(micro.packing, longest=max(longest, micro.packing.longest))
    policy.dtype = torch.float32
    ours_M, _ = policy(replace(micro, packing=packing), temperature=1.0, with_entropy=False)
    policy.dtype = dtype
    model.set_attn_implementation(attention(model.config, PLAIN))
    theirs_R = [_own_logprobs(policy, prompt, response, micro.images) for prompt, response in sequences]
    model.set_attn_implementation(attention(model.config))
    ours_R = ours_M.split([len(response) for _, response in sequences])
    return torch.stack([(ours - own).abs().max() for ours, own in zip(ours_R, theirs_R, strict=True)])


def _own_logprobs(
    policy: Policy, prompt: NDArray[np.int64], response: NDArray[np.int64], images: PackedImages | None
) -> Tensor:
    """[T] log-probs of a response by the model's own forward pass, over the tokens that can be sampled."""
    ids = torch.from_numpy(np.concatenate((prompt, response))).to(policy.device)
    inputs: dict[str, Any] = {"input_ids": ids[None]}
    if images is not None and policy.vision is not None:
        inputs |= {"pixel_values": images.pixels, "image_grid_thw": images.grid}
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == policy.vision.image_token).int()
    logits = policy.model(**inputs, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    allowed = torch.tensor(policy.sampled_tokens, device=policy.device)
    chosen = logits.gather(1, ids[len(prompt) :, None]).squeeze(1)
    logprobs: Tensor = chosen - logits.index_select(1, allowed).logsumexp(-1)
    return logprobs


def _noise(vision: VisionModel) -> Patches:
    """A random image of 2 x 3 tokens."""
    rows, columns = 2 * vision.merge, 3 * vision.merge
    pixels = np.random.default_rng(0).standard_normal((rows * columns, 3 * vision.frames * vision.patch**2))
    return Patches(pixels=pixels.astype(np.float32), height=rows, width=columns)
