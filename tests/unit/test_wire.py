"""Frames: what is packed is unpacked, in a time that does not know how many tokens there are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from bapo.core.codec import (
    batch_header,
    pack_batch,
    pack_batch_frames,
    pack_group,
    read_group_header,
    result_from_map,
    result_map,
    unpack_batch,
    unpack_group,
)
from bapo.core.errors import ContractError
from bapo.core.frames import MAX_HEADER_BYTES, PREFIX, frame_start, split_frames
from bapo.core.types import Group, Origin, Prompt, Purpose, Timing
from tests.support.factories import FULL_RESULT, make_batch, make_group

COLUMNS = ("prompt_token_ids", "token_ids", "rollout_logprobs", "lengths", "rewards", "outcomes", "versions")
FIELDS = ("group_id", "prompt", "purpose", "step", "label", "worker_id", "timing")

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def int32s(size: int, low: int = 0) -> st.SearchStrategy[Any]:
    return npst.arrays(np.int32, size, elements=st.integers(low, 2**31 - 1))


@st.composite
def groups(draw: st.DrawFn) -> Group:
    size = draw(st.integers(1, 5))
    lengths = np.array(draw(st.lists(st.integers(1, 4), min_size=size, max_size=size)), dtype=np.int32)
    num_tokens = int(lengths.sum())
    oldest = draw(st.integers(0, 1000))
    return Group(
        group_id=draw(st.text(max_size=8)),
        prompt=Prompt(
            prompt_id=draw(st.text(max_size=8)),
            text=draw(st.text(max_size=20)),
            task=draw(st.text(max_size=8)),
            answer=draw(st.dictionaries(st.text(max_size=3), json_values, max_size=3)),
        ),
        purpose=draw(st.sampled_from(Purpose)),
        step=draw(st.integers(0, 2**40)),
        label=draw(st.text(max_size=5)),
        worker_id=draw(st.text(max_size=5)),
        prompt_token_ids=draw(int32s(draw(st.integers(0, 4)))),
        token_ids=draw(int32s(num_tokens)),
        rollout_logprobs=draw(npst.arrays(np.float32, num_tokens, elements=st.floats(-1000, 0, width=32))),
        lengths=lengths,
        rewards=draw(npst.arrays(np.float32, size, elements=st.floats(0, 1, width=32))),
        outcomes=draw(
            npst.arrays(np.uint8, size, elements=st.integers(0, 2)).filter(lambda values: (values != 2).any())
        ),
        versions=np.array([[oldest, oldest + draw(st.integers(0, 3))] for _ in range(size)], dtype=np.int32),
        timing=Timing(claimed_at=draw(st.floats(0, 2e9)), sample_s=draw(st.floats(0, 1e6)), grade_s=0.0),
    )


def assert_same_group(found: Group, want: Group) -> None:
    for name in FIELDS:
        assert getattr(found, name) == getattr(want, name)
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(found, name), getattr(want, name), err_msg=name, strict=True)


@given(group=groups())
def test_a_group_comes_back_as_it_was(group: Group) -> None:
    frame = pack_group(group)
    assert_same_group(unpack_group(frame), group)
    header = read_group_header(frame)
    assert header.prompt == group.prompt
    assert header.rewards == tuple(group.rewards.tolist())
    assert (header.policy_version, header.num_tokens) == (group.policy_version, len(group.token_ids))


@given(members=st.lists(groups(), max_size=3), data=st.data())
def test_a_batch_comes_back_as_it_was(members: list[Group], data: st.DataObject) -> None:
    origins = [data.draw(st.sampled_from(Origin)) for _ in members]
    batch = make_batch(groups=members, origins=origins, step=9, num_bad=2**33)
    found = unpack_batch(pack_batch(batch))
    assert batch_header(found) == batch_header(batch)
    for entry, want in zip(found.entries, batch.entries, strict=True):
        assert entry.origin == want.origin
        assert_same_group(entry.group, want.group)


def test_an_empty_batch_is_a_batch() -> None:
    found = unpack_batch(pack_batch(make_batch(groups=[])))
    assert (found.entries, found.results) == ((), ())


def test_stored_frames_and_a_header_make_the_same_batch_frame() -> None:
    batch = make_batch(groups=[make_group(), make_group(prompt_id="q")])
    frames = [pack_group(entry.group) for entry in batch.entries]
    assert pack_batch_frames(batch_header(batch), frames) == pack_batch(batch)


def test_frames_of_a_stream_are_split_where_they_end() -> None:
    frames = [pack_group(make_group(prompt_id=name, rewards="10")) for name in "abc"]
    assert [bytes(frame) for frame in split_frames(b"".join(frames))] == frames
    assert list(split_frames(b"")) == []


def test_a_result_comes_back_as_it_was() -> None:
    assert result_from_map(result_map(FULL_RESULT)) == FULL_RESULT


def test_runs_of_versions_travel_with_a_group_that_has_them_and_take_no_byte_of_another() -> None:
    group = make_group(rewards="10", lengths=[3, 1])
    pairs = np.array([[1, 2], [1, 1]], np.int32)
    spans = np.array([[2, 1], [1, 2], [1, 1]], np.int32)
    again = unpack_group(pack_group(replace(group, versions=pairs, spans=spans)))
    assert again.spans is not None
    assert (again.spans.tolist(), again.token_versions.tolist()) == (spans.tolist(), [1, 1, 2, 1])
    assert again.policy_version == 1
    assert unpack_group(pack_group(group)).spans is None
    assert b"spans" not in pack_group(group)
    damaged = pack_group(replace(group, versions=pairs, spans=spans)).replace(
        spans.tobytes(), np.array([[1, 1], [2, 2], [1, 1]], np.int32).tobytes()
    )
    read_group_header(damaged)  # another cut that says the same of each response
    wrong = damaged.replace(
        np.array([[1, 1], [2, 2]], np.int32).tobytes(), np.array([[1, 3], [2, 2]], np.int32).tobytes()
    )
    with pytest.raises(ContractError, match="inconsistent"):
        read_group_header(wrong)


def test_the_header_does_not_grow_with_the_tokens() -> None:
    sizes = [PREFIX.unpack_from(pack_group(make_group(lengths=[n] * 8)))[3] for n in (8, 8192)]
    assert sizes[0] == sizes[1] < 500


def test_a_header_is_read_without_its_body_being_looked_at() -> None:
    frame = bytearray(pack_group(make_group(lengths=[8192] * 8)))
    frame[-8 * 8192 * 8 :] = bytes(b"\xff" * (8 * 8192 * 8))
    assert read_group_header(bytes(frame)).num_tokens == 8 * 8192


@pytest.mark.parametrize("answer", [{"target": 2**70}, {"target": object()}, {"x": [{1, 2}]}, {"x": (float("nan"),)}])
def test_an_answer_that_is_no_json_value_is_refused_when_its_prompt_is_made(answer: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match=r"^prompt p: its answer contains"):
        Prompt(prompt_id="p", text="", task="countdown", answer=answer)


def test_a_frame_that_no_peer_would_read_is_refused_when_packed() -> None:
    with pytest.raises(ContractError, match="the limit is"):
        frame_start(1, {"text": "x" * MAX_HEADER_BYTES}, 0)
    with pytest.raises(ContractError, match="the limit is"):
        frame_start(1, {}, 1 << 32)


@pytest.mark.parametrize("rewards", [[1, 0], torch.tensor([1.0, 0.0])], ids=["a list", "a tensor"])
def test_a_column_that_is_no_array_is_refused_where_the_group_is_made(rewards: Any) -> None:
    with pytest.raises(ContractError, match=r"rewards must be a numpy array, got (list|Tensor)"):
        replace(make_group(rewards="10"), rewards=rewards)


def test_lengths_that_are_no_whole_numbers_are_refused() -> None:
    group = make_group(rewards="10")
    with pytest.raises(ContractError, match=r"expected integers .*, got float64"):
        pack_group(replace(group, lengths=group.lengths.astype(np.float64)))
