"""Packed sequences give what padded sequences give; padding stays small; what cannot be packed is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

from bapo.core.errors import ConfigError, ContractError
from bapo.core.sequences import sequences_of
from learner.batch.columns import columns_of
from learner.batch.microbatch import Piece, build
from learner.batch.packed_attention import NARROWEST, pack_rows
from learner.model.backbone import refuse_changing_rope
from learner.model.policy import Policy, check_head
from tests.support.learner import CPU, learner_config, random_batch, tiny_policy

VOCAB = 218


SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
}


MODELS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SMALL, num_key_value_heads=1),
    "qwen3": Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=16),
    "mistral": MistralConfig(**SMALL, num_key_value_heads=4, sliding_window=None),
    "gpt_neox": GPTNeoXConfig(**SMALL),
    # Scores are not divided by the root of the head size.
    "granite": GraniteConfig(**SMALL, num_key_value_heads=2, attention_multiplier=0.7),
}


def make_model(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().eval()


def padded_logprobs(model: PreTrainedModel, sequences: list[list[int]], starts: list[int]) -> list[torch.Tensor]:
    """Log-probs of the tokens from `start` on, by an ordinary forward pass over right-padded rows."""
    longest = max(map(len, sequences))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in sequences])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in sequences])
    logp = model(input_ids=ids, attention_mask=mask).logits.float().log_softmax(-1)
    chosen = logp[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    return [chosen[i, starts[i] - 1 : len(row) - 1] for i, row in enumerate(sequences)]


def whole_sequences(batch: Any) -> tuple[list[list[int]], list[int]]:
    """All sequences of a batch with the position of their first response token."""
    sequences, starts = [], []
    for entry in batch.entries:
        prompt = entry.group.prompt_token_ids.tolist()
        for response in sequences_of(entry.group):
            sequences.append(prompt + response.token_ids.tolist())
            starts.append(len(prompt))
    return sequences, starts


@pytest.mark.parametrize("name", MODELS)
def test_packed_and_padded_forward_give_the_same_log_probs_and_gradients(name: str) -> None:
    batch = random_batch(num_groups=3)
    columns = columns_of(batch, learner_config())
    pieces = [Piece(group=i, responses=tuple(range(4 * i, 4 * i + 4))) for i in range(3)]
    model = make_model(MODELS[name])
    direction = torch.randn(len(columns.token_ids_M), generator=torch.Generator().manual_seed(0))

    expected = torch.cat(padded_logprobs(model, *whole_sequences(batch)))
    (expected * direction).sum().backward()
    expected_grads = {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()

    model.set_attn_implementation("packed")
    micro = build(columns, pieces, CPU)
    got, _ = Policy(model, chunk_tokens=7)(micro)
    (got * direction).sum().backward()

    assert (got - expected).abs().max() < 1e-5
    for key, value in model.named_parameters():
        if key in expected_grads:
            torch.testing.assert_close(value.grad, expected_grads[key], rtol=1e-4, atol=1e-5)


def test_no_token_is_computed_twice_and_none_is_padding() -> None:
    batch = random_batch(num_groups=2)
    columns = columns_of(batch, learner_config())
    micro = build(columns, [Piece(group=0, responses=(0, 1, 2, 3)), Piece(group=1, responses=(4, 5, 6, 7))], CPU)
    prompts = sum(len(prompt) for prompt in columns.prompts_E)
    # The last token of each of the 8 responses predicts nothing, so it is not packed.
    assert micro.num_tokens == prompts + len(columns.token_ids_M) - 8
    assert micro.token_ids_N.min() >= 4


def test_each_response_token_is_predicted_by_the_token_before_it() -> None:
    batch = random_batch(num_groups=2)
    columns = columns_of(batch, learner_config())
    micro = build(columns, [Piece(group=0, responses=(2, 0)), Piece(group=1, responses=(5,))], CPU)
    before, target, response = [], [], []
    for row, (group, index) in enumerate(((0, 2), (0, 0), (1, 1))):
        member = list(sequences_of(batch.entries[group].group))[index].token_ids.tolist()
        before += [int(batch.entries[group].group.prompt_token_ids[-1]), *member[:-1]]
        target += member
        response += [row] * len(member)
    assert micro.token_ids_N[micro.predict_M].tolist() == before
    assert micro.target_M.tolist() == target
    assert (micro.rows.index_M.tolist(), micro.rows.count) == (response, 3)
    assert columns.token_ids_M[micro.slot_M.numpy()].tolist() == target


def test_a_sliding_window_shorter_than_a_sequence_is_refused_and_a_longer_one_changes_nothing() -> None:
    batch = random_batch(num_groups=1)
    columns = columns_of(batch, learner_config())
    micro = build(columns, [Piece(group=0, responses=(0, 1, 2, 3))], CPU)
    kind = {**SMALL, "num_key_value_heads": 4}
    full = make_model(MistralConfig(**kind, sliding_window=None))
    wide = make_model(MistralConfig(**kind, sliding_window=100))
    wide.load_state_dict(full.state_dict())
    narrow = make_model(MistralConfig(**kind, sliding_window=4))
    for model in (full, wide, narrow):
        model.set_attn_implementation("packed")
    torch.testing.assert_close(Policy(wide)(micro)[0], Policy(full)(micro)[0])
    with pytest.raises(ConfigError, match="sliding window of 4 tokens"):
        Policy(narrow)(micro)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_at_most_a_fifth_of_a_row_is_padding_and_every_token_has_a_place(lengths: list[int]) -> None:
    ends = np.cumsum(lengths)
    rows = [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    packing = pack_rows(rows, int(ends[-1]), CPU)
    places = torch.cat([bucket.tokens_RW for bucket in packing.buckets])
    assert places[packing.places_N].tolist() == list(range(int(ends[-1])))
    widths = sorted((bucket.width for bucket in packing.buckets for _ in range(bucket.num_rows)), reverse=True)
    for width, length in zip(widths, sorted(lengths, reverse=True), strict=True):
        assert NARROWEST * width <= length <= width
    assert packing.longest == max(lengths)


def test_packed_tokens_of_no_sequence_are_refused_instead_of_read_from_unset_memory() -> None:
    with pytest.raises(ContractError):
        pack_rows([np.arange(3)], 5, CPU)


def test_a_model_whose_head_is_more_than_a_matrix_is_refused_at_start() -> None:
    model = make_model(MODELS["llama"])
    model.set_attn_implementation("packed")
    check_head(Policy(model), "fine")
    plain_forward = model.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = plain_forward(*args, **kwargs)
        output.logits = output.logits * 0.5
        return output

    model.forward = scaled
    with pytest.raises(ConfigError, match="differ by"):
        check_head(Policy(model), "scaled")
    biased = make_model(MODELS["llama"])
    biased.lm_head = torch.nn.Linear(32, VOCAB, bias=True)
    biased.set_attn_implementation("packed")
    with pytest.raises(ConfigError, match="without bias"):
        check_head(Policy(biased), "biased")


HYBRIDS: dict[str, PretrainedConfig] = {
    "convolution": Lfm2Config(**SMALL, num_key_value_heads=2, layer_types=["conv", "full_attention"]),
    "linear attention": Qwen3NextConfig(
        **SMALL,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        mlp_only_layers=[0, 1],
        layer_types=["linear_attention", "full_attention"],
    ),
}


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_model_with_layers_that_read_across_packed_sequences_is_refused_at_start(kind: str) -> None:
    model = make_model(HYBRIDS[kind])
    model.set_attn_implementation("packed")
    with pytest.raises(ConfigError, match=rf"{type(model).__name__} has layers that read across sequences"):
        check_head(Policy(model), kind)


LONGROPE = Phi3Config(
    **SMALL,
    pad_token_id=0,
    original_max_position_embeddings=36,
    rope_parameters={
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 36,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
    },
)
DYNAMIC = LlamaConfig(
    **(SMALL | {"max_position_embeddings": 36}),
    rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
)


@pytest.mark.parametrize("settings", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_sequences_beyond_the_original_context_of_a_rope_that_changes_with_the_pass_are_refused(
    settings: PretrainedConfig, tmp_path: Path
) -> None:
    refuse_changing_rope(settings, learner_config())  # 12 + 24 tokens
    refuse_changing_rope(MODELS["llama"], learner_config(rollout={"max_prompt_tokens": 99}))
    settings.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"max_response_tokens = 37 is more than the 36 tokens"):
        tiny_policy(learner_config(tmp_path, rollout={"max_prompt_tokens": 13}))
    with pytest.raises(ConfigError, match=r"max_model_len = 64 is more"):  # vLLM chooses by it
        tiny_policy(learner_config(tmp_path, rollout={"engine_options": {"max_model_len": 64}}))
