"""Attention over packed sequences: the only place with padding.

Suffixes: N packed tokens, R rows (one sequence each), W width of a bucket, H heads, K key-value heads, D head size.

The rest of the model runs on the N real tokens. Here they are gathered into a few rectangles of similar length
(buckets), causal attention runs on each, and the results are gathered back. A prompt token shared by the responses of
a group is packed once and gathered into each of their rows, so its embedding, MLP and norms are computed once.
Padding is on the right of real tokens, so causality masks it; its outputs are dropped and its gradients are exactly
zero.

Works for any transformers causal LM that calls the attention interface and encodes position by `position_ids`.
Does not cover: sliding windows shorter than a sequence, attention sinks, soft-capped scores, layers besides attention
that mix tokens (rejected, not ignored; the latter by `check_head` of `learner.model.policy`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from bapo.core.errors import ConfigError, ContractError

NAME = "packed"
"""Name registered in transformers; no mask function has this name, so transformers builds no mask."""

NARROWEST = 0.8
"""A row shorter than this share of its bucket's width starts the next bucket: at most 20 % of a row is padding."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bucket:
    """Rows of similar length."""

    tokens_RW: Tensor
    """[R * W] int64: index of the packed token at each position; padding repeats token 0."""
    num_rows: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """How N packed tokens are gathered into rows, and the results back."""

    buckets: tuple[Bucket, ...]
    places_N: Tensor
    """[N] int64: position of each packed token in the concatenated buckets; any one of several for a shared token."""
    longest: int
    """Tokens of the longest row."""


def pack_rows(rows: Sequence[NDArray[np.int64]], num_tokens: int, device: torch.device) -> Packing:
    """Plan attention for sequences given as indices into N packed tokens.

    Args:
        rows: per sequence the indices of its packed tokens, in order; together they cover every token.
    Raises: ContractError if they do not: the attention of such a token would be read from unset memory.
    """
    order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
    buckets, places_N, start = [], np.full(num_tokens, -1), 0
    while order:
        width = len(rows[order[0]])
        num_rows = sum(len(rows[row]) >= NARROWEST * width for row in order)
        members, order = order[:num_rows], order[num_rows:]
        tokens_RW = np.zeros((num_rows, width), dtype=np.int64)
        for i, row in enumerate(members):
            tokens = rows[row]
            tokens_RW[i, : len(tokens)] = tokens
            places_N[tokens] = np.arange(start + i * width, start + i * width + len(tokens))
        start += num_rows * width
        tensor = torch.from_numpy(tokens_RW.reshape(-1)).to(device)
        buckets.append(Bucket(tokens_RW=tensor, num_rows=num_rows, width=width))
    if num_apart := int((places_N < 0).sum()):
        raise ContractError(f"{num_apart} of {num_tokens} packed tokens belong to no sequence")
    longest = max(bucket.width for bucket in buckets)
    return Packing(buckets=tuple(buckets), places_N=torch.from_numpy(places_N).to(device), longest=longest)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row (signature of a transformers attention function).

    Args:
        query: [1, H, N, D]; key, value: [1, K, N, D], with rotary embeddings applied.
    Returns: [1, N, H, D] and no attention weights.
    Raises: ConfigError for a model whose attention is not plain causal attention.
    """
    _refuse_other_attention(attention_mask, packing, options)
    query_NHD, key_NKD, value_NKD = (states.transpose(1, 2)[0] for states in (query, key, value))
    outputs = []
    for bucket in packing.buckets:
        query_RHWD, key_RKWD, value_RKWD = (_gather(states, bucket) for states in (query_NHD, key_NKD, value_NKD))
        output_RHWD = scaled_dot_product_attention(
            query_RHWD, key_RKWD, value_RKWD, is_causal=True, scale=scaling, enable_gqa=True
        )
        outputs.append(output_RHWD.transpose(1, 2).reshape(-1, *query_NHD.shape[1:]))
    places = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return places.index_select(0, packing.places_N).unsqueeze(0), None


def _gather(states_NHD: Tensor, bucket: Bucket) -> Tensor:
    """[N, H, D] -> [R, H, W, D]."""
    rows = states_NHD.index_select(0, bucket.tokens_RW)
    return rows.view(bucket.num_rows, bucket.width, *states_NHD.shape[1:]).transpose(1, 2)


def _refuse_other_attention(attention_mask: Tensor | None, packing: Packing, options: dict[str, Any]) -> None:
    window = options.get("sliding_window")
    if window is not None and window < packing.longest:
        raise ConfigError(
            f"the model uses a sliding window of {window} tokens but a sequence has {packing.longest}; "
            "lower rollout.max_prompt_tokens + rollout.max_response_tokens or choose another model.path"
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ConfigError(f"the model's attention uses {name}, which the packed learner does not support")
    if attention_mask is not None:
        raise ConfigError("the model passes its own attention mask, which the packed learner does not support")


# Every micro-batch has other buckets, so other shapes: a compiled layer calls this as it is.
AttentionInterface.register(NAME, torch.compiler.disable(packed_attention))
