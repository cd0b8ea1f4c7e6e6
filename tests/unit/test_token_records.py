"""Token records: the learner's own numbers of every token, their text, and a recorder that never disturbs training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo.core.errors import UnavailableError
from bapo.core.sequences import sequences_of
from bapo.core.types import Batch, Group
from bapo.runtime.run_directory.responses import TokenFiles, TokenRow
from bapo.runtime.run_directory.transcripts import TurnText
from learner.diagnostics.response_recorder import ResponseRecorder
from learner.diagnostics.response_rows import Recorded, RowMaker, TokenTexts
from learner.diagnostics.step_report import TokenValues
from tests.support.factories import make_batch, make_group
from tests.support.learner import (
    FakeBuffer,
    FakeFleet,
    learner_config,
    make_test_learner,
    make_updater,
    random_batch,
    tiny_policy,
)
from tests.support.recorded_responses import EPISODE, token_row
from tests.unit.test_turns import episodes


def values_of(model_path: Path, tmp_path: Path, batch: Batch, **sections: Any) -> TokenValues:
    config = learner_config(model_path, **{"diagnostics": {"token_records": 1}, **sections})
    report = make_updater(config, tiny_policy(config), tmp_path).run(batch)
    assert report.tokens is not None
    return report.tokens


def plain(model_path: Path, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """log pi_theta_t and entropy of every response token, one ordinary forward pass per response."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="sdpa").eval()
    logprobs, entropy = [], []
    for entry in batch.entries:
        prompt = entry.group.prompt_token_ids.tolist()
        for response in sequences_of(entry.group):
            ids = torch.tensor([prompt + response.token_ids.tolist()])
            with torch.no_grad():
                logp = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            logprobs.append(logp.gather(1, ids[0, len(prompt) :, None]).squeeze(1).numpy())
            entropy.append(-(logp.exp() * logp).sum(-1).numpy())
    return np.concatenate(logprobs), np.concatenate(entropy)


def test_the_values_are_those_of_a_plain_forward_pass_and_the_ratio_is_to_the_rollout_policy(
    model_path: Path, tmp_path: Path
) -> None:
    # One mini-batch: all of it is computed before the only optimizer step, so by theta_t.
    batch = random_batch(num_groups=4)
    found = values_of(
        model_path, tmp_path, batch, learner={"minibatch_size": 4}, loss={"ratio_mode": "direct", "kl_coef": 0.01}
    )
    logprobs, entropy = plain(model_path, batch)
    rollout = np.concatenate([entry.group.rollout_logprobs for entry in batch.entries])
    np.testing.assert_allclose(found.logprobs_M, logprobs, atol=2e-5)
    np.testing.assert_allclose(found.entropy_M, entropy, atol=2e-5)
    np.testing.assert_allclose(found.ratio_M, np.exp(np.clip(logprobs - rollout, -20, 20)), rtol=1e-3)


def test_a_token_is_clipped_where_its_ratio_is_beyond_the_bound_that_its_advantage_meets(
    model_path: Path, tmp_path: Path
) -> None:
    batch = random_batch(num_groups=4)
    settings = {"ratio_mode": "direct", "clip_low": 0.2, "clip_high": 0.3, "dual_clip": None, "kl_coef": 0.01}
    found = values_of(model_path, tmp_path, batch, learner={"minibatch_size": 4}, loss=settings)
    beyond = ((found.advantage_M > 0) & (found.ratio_M > 1.3)) | ((found.advantage_M < 0) & (found.ratio_M < 0.8))
    assert 0 < beyond.sum() < len(beyond)
    np.testing.assert_array_equal(found.clipped_M > 0, beyond)


def test_recording_changes_no_weight(model_path: Path, tmp_path: Path) -> None:
    weights = []
    for every in (0, 1):
        config = learner_config(model_path, diagnostics={"token_records": every})
        policy = tiny_policy(config)
        make_updater(config, policy, tmp_path).run(random_batch())
        weights.append(torch.cat([parameter.detach().flatten() for parameter in policy.parameters()]))
    assert torch.equal(*weights)


def test_a_run_writes_one_file_per_recorded_step_with_every_response_of_its_batch(
    model_path: Path, tmp_path: Path
) -> None:
    config = learner_config(model_path, diagnostics={"token_records": 2})
    batches = {step: random_batch(step=step, num_groups=3) for step in range(1, 5)}
    learner = make_test_learner(config, tmp_path, buffer=FakeBuffer(batches.__getitem__), fleet=FakeFleet())
    learner.run(1)
    assert learner.token_records is not None
    learner.token_records.close()
    files = TokenFiles(tmp_path)
    assert files.steps() == [2, 4]
    group = batches[4].entries[1].group
    rows = files.read_group(4, group.group_id)
    assert [row.row for row in rows] == [0, 1, 2, 3]
    assert [row.reward for row in rows] == group.rewards.tolist()
    assert [token for row in rows for token in row.token_ids] == group.token_ids.tolist()
    np.testing.assert_array_equal([x for row in rows for x in row.rollout_logprobs], group.rollout_logprobs)
    assert rows[0].prompt == group.prompt.text
    assert {row.origin for row in rows} == {batches[4].entries[1].origin.value}
    mean, sigma = group.rewards.mean(), np.sqrt(group.rewards.var() + config.loss.advantage_eps)
    np.testing.assert_allclose([row.advantage for row in rows], (group.rewards - mean) / sigma, rtol=1e-5)
    assert all(len(row.pieces) == len(row.token_ids) == len(row.entropy or row.token_ids) for row in rows)
    assert files.read_group(4, "no such group") == files.read_group(3, group.group_id) == []


def test_a_run_keeps_the_text_of_every_group_also_of_those_that_did_not_train(model_path: Path, tmp_path: Path) -> None:
    config = learner_config(
        model_path, diagnostics={"texts": 1, "token_records": 4}, task={"name": f"{__name__}:raising"}
    )
    batches = {step: random_batch(step=step, num_groups=2) for step in range(1, 5)}
    others = {step: [random_batch(step=50 + step, num_groups=1).entries[0].group] for step in (2, 3, 4)}
    buffer = FakeBuffer(batches.__getitem__, not_trained=others)
    learner = make_test_learner(config, tmp_path, buffer=buffer, fleet=FakeFleet())
    learner.run(1)
    assert learner.token_records is not None
    learner.token_records.close(60)
    files, tokenizer = TokenFiles(tmp_path), AutoTokenizer.from_pretrained(model_path)
    assert files.steps() == [1, 2, 3, 4]
    assert [len(files.read_untrained(step)) for step in files.steps()] == [0, 1, 1, 1]
    for group, origin in ((others[3][0], None), (batches[3].entries[1].group, batches[3].entries[1].origin.value)):
        rows = files.read_group(3, group.group_id)
        assert [row.reward for row in rows] == group.rewards.tolist()
        assert {(row.origin, row.is_text_alone, row.entropy) for row in rows} == {(origin, True, None)}
        for row, response in zip(rows, sequences_of(group), strict=True):
            text = tokenizer.decode(response.token_ids.tolist(), skip_special_tokens=True)
            assert (row.pieces, row.extracted) == ([text], f"[{text}]")
            assert row.token_ids == response.token_ids.tolist()
    trained = batches[3].entries[0].group
    mean, sigma = trained.rewards.mean(), np.sqrt(trained.rewards.var() + config.loss.advantage_eps)
    found = [row.advantage for row in files.read_group(3, trained.group_id)]
    np.testing.assert_allclose(found, (trained.rewards - mean) / sigma, rtol=1e-5)  # type: ignore[arg-type]
    assert not files.read_group(4, batches[4].entries[0].group.group_id)[0].is_text_alone
    assert files.read_group(4, others[4][0].group_id)[0].is_text_alone


def test_a_buffer_that_does_not_answer_costs_the_texts_of_untrained_groups_alone(
    model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def away(step: int) -> list[Group]:
        raise UnavailableError("the buffer service is away")

    recorder = ResponseRecorder(learner_config(model_path, diagnostics={"texts": 1}), TokenFiles(tmp_path), away)
    batch = random_batch(num_groups=1)
    recorder.expect(1)
    recorder.put(batch, None, values_like(batch).advantage_M)
    recorder.close(60)
    assert "step 1 has no texts of groups that did not train: the buffer service is away" in caplog.text
    assert TokenFiles(tmp_path).steps() == [1]


def row(group_id: str, number: int = 0, **changed: Any) -> TokenRow:
    unknown = dict.fromkeys(("logprobs", "entropy", "ratio", "clipped"))
    return token_row(number, ["2", "!"], group=group_id, step=1, **{**unknown, **changed})


def test_a_file_gives_back_what_was_written_also_for_ids_that_begin_alike(tmp_path: Path) -> None:
    long = "fresh-" + "0" * 200
    groups = [[row("a"), row("a", 1)], [row(long + "1", clipped=[True, False])], [row(long + "2")]]
    files = TokenFiles(tmp_path)
    files.write(1, groups, left_out=5)
    assert files.read_group(1, "a") == groups[0]
    assert files.read_group(1, long + "2") == groups[2]
    assert files.read_group(1, long + "1") == groups[1]
    assert files.left_out(1) == 5
    assert [head["text"] for head in files.read_heads(1)] == ["2!"] * 4


def test_a_resumed_run_forgets_what_later_steps_recorded(tmp_path: Path) -> None:
    files = TokenFiles(tmp_path)
    for step in (4, 5, 6):
        files.write(step, [[row("a")]])
    files.truncate_after(5)
    assert files.steps() == [4, 5]


class Numbers:
    """A tokenizer whose tokens are their ids; 34 and 41 are special."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(f" {i}" for i in token_ids if not (skip_special_tokens and i in (34, 41)))


def maker() -> RowMaker:
    found = RowMaker(learner_config(task={"name": f"{__name__}:raising"}))
    found.__dict__["_texts"] = TokenTexts(Numbers())
    return found


TURNS = (
    TurnText(parent=-1, num_tokens=2, context=" 20"),
    TurnText(parent=0, num_tokens=1, context=" 21"),
    TurnText(parent=0, num_tokens=2, context=" 22 23"),
)


def test_a_row_of_an_episode_has_its_turns_and_the_text_that_a_reward_function_reads() -> None:
    """Of `episodes`: 20 | 30 31, then 21 | 32, or 22 23 | 33 34 instead."""
    batch = make_batch(groups=[episodes()])
    (rows,), _ = maker().groups(Recorded(batch=batch, values=values_like(batch)), 1_000_000)
    (alone,) = maker().untrained(1, [episodes()])
    for row, pieces, text in (
        (rows[0], [" 30", " 31", " 32", " 33", " 34"], " 33 34"),
        (alone[0], [" 30 31", " 32", " 33"], " 33"),
    ):
        assert (row.pieces, row.text) == (pieces, text)
        assert row.turns == TURNS
        assert row.engine_prompt == " 10 11"
        assert row.extracted == "[ 33]"
        assert row.token_ids == [30, 31, 32, 33, 34]
    assert (rows[1].turns, rows[1].text, alone[1].text) == ((), " 40 41", " 40")  # one turn after the prompt


def test_tokens_that_were_too_old_to_train_have_text_and_no_values() -> None:
    batch = make_batch(groups=[episodes()])
    known_M = np.array([False, False, True, True, True, True, True])
    values = replace(values_like(batch), advantage_M=np.full(7, 0.5, np.float32))
    trained = replace(values, **{field.name: getattr(values, field.name)[known_M] for field in fields(values)})
    ((first, second),), _ = maker().groups(Recorded(batch=batch, values=trained.spread(known_M)), 1_000_000)
    assert first.pieces == [" 30", " 31", " 32", " 33", " 34"]
    assert first.entropy == [None, None, 0.0, 0.0, 0.0]
    assert first.clipped == [None, None, False, False, False]
    assert second.entropy == [0.0, 0.0]


def test_a_plain_group_has_neither_turns_nor_a_prompt_of_the_engine() -> None:
    (rows,) = maker().untrained(1, [make_group()])
    assert {(row.turns, row.engine_prompt) for row in rows} == {((), None)}


def test_the_context_of_episodes_counts_against_the_limit_of_a_file() -> None:
    batch = make_batch(groups=[episodes(), replace(episodes(), group_id="second")])
    recorded = Recorded(batch=batch, values=values_like(batch))
    both = 2 * (7 * 18 + 4 * 4)  # tokens of 18 bytes, context tokens of 4
    assert [maker().groups(recorded, limit)[1] for limit in (both, both - 1)] == [0, 1]


def test_episodes_are_given_back_and_no_other_file_has_their_columns(tmp_path: Path) -> None:
    import pyarrow.parquet

    files = TokenFiles(tmp_path)
    files.write(1, [EPISODE, [row("a")]])
    files.write(2, [[row("a")]])
    for found, want in zip(files.read_group(1, EPISODE[0].group_id), EPISODE, strict=True):
        assert (found.turns, found.engine_prompt, found.pieces) == (want.turns, want.engine_prompt, want.pieces)
    assert files.read_group(1, "a") == files.read_group(2, "a") == [row("a")]
    assert not {"turns", "engine_prompt"} & set(
        pyarrow.parquet.read_schema(tmp_path / "token_records" / NAMES[2]).names
    )
    first, *_, last = files.read_heads(1)
    assert first["text"] == "get(a)<eos><tool>37<assistant>calc(37+5)<eos><tool>42<assistant>42"
    assert (last["text"], last["num_shown"]) == ("2!", 2)


NAMES = {step: f"step-{step:06d}.parquet" for step in (1, 2)}


def test_a_file_from_before_images_and_episodes_is_read(tmp_path: Path) -> None:
    import pyarrow.parquet

    files, path = TokenFiles(tmp_path), tmp_path / "token_records" / NAMES[1]
    files.write(1, [[row("a")]])
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).drop_columns(["images"]), path)
    assert files.read_group(1, "a") == [row("a")]
    assert files.read_heads(1)[0]["text"] == "2!"


def values_like(batch: Batch) -> TokenValues:
    tokens = np.zeros(sum(len(entry.group.token_ids) for entry in batch.entries), dtype=np.float32)
    return TokenValues(logprobs_M=tokens, entropy_M=tokens, ratio_M=tokens, clipped_M=tokens, advantage_M=tokens)


def raising(**_: Any) -> Any:
    class Task:
        name = "raising"
        held_out_splits = ()

        def prompts(self, split: str) -> list[Any]:
            return []

        def reward(self, prompt: Any, text: str) -> float:
            return 0.0

        def gold(self, prompt: Any) -> str:
            raise ValueError("no gold here")

        def extract(self, prompt: Any, text: str) -> str:
            return f"[{text}]"

    return Task()
