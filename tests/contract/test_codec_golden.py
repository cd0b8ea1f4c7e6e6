"""The bytes on the wire, written out by hand: a change here breaks every stored group and every peer."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np

from bapo.core.codec import pack_batch, pack_group, read_group_header, unpack_batch, unpack_group
from bapo.core.types import Batch, BatchEntry, Group, GroupResult, Origin, Prompt, Purpose, Timing

GROUP = Group(
    group_id="g1",
    prompt=Prompt(prompt_id="p", text="1,2->3:", task="countdown", answer={"target": 3}),
    purpose=Purpose.FRESH,
    step=7,
    label="",
    worker_id="w0",
    prompt_token_ids=np.array([1, 2], dtype=np.int32),
    token_ids=np.array([3, 4, 300], dtype=np.int32),
    rollout_logprobs=np.array([-0.5, -1.0, -2.0], dtype=np.float32),
    lengths=np.array([1, 2], dtype=np.int32),
    rewards=np.array([1.0, 0.0], dtype=np.float32),
    outcomes=np.array([0, 1], dtype=np.uint8),
    versions=np.array([[5, 5], [5, 6]], dtype=np.int32),
    timing=Timing(claimed_at=1.5, sample_s=0.5, grade_s=0.25),
)

GROUP_HEADER = bytes.fromhex(
    "8c"  # map of 12
    "a2 6964" + "a2 6731"  # id: g1
    "a6 70726f6d7074" + "84"  # prompt: map of 4
    "a9 70726f6d70745f6964" + "a1 70"  # prompt_id: p
    "a4 74657874" + "a7 312c322d3e333a"  # text: 1,2->3:
    "a4 7461736b" + "a9 636f756e74646f776e"  # task: countdown
    "a6 616e73776572" + "81 a6 746172676574 03"  # answer: {target: 3}
    "a7 707572706f7365" + "a5 6672657368"  # purpose: fresh
    "a4 73746570" + "07"  # step: 7
    "a5 6c6162656c" + "a0"  # label: ""
    "a6 776f726b6572" + "a2 7730"  # worker: w0
    "aa 6e756d5f70726f6d7074" + "02"  # num_prompt: 2
    "a7 6c656e67746873" + "c4 08 01000000 02000000"  # lengths i32
    "a7 72657761726473" + "c4 08 0000803f 00000000"  # rewards f32
    "a8 6f7574636f6d6573" + "c4 02 00 01"  # outcomes u8
    "a8 76657273696f6e73" + "c4 10 05000000 05000000 05000000 06000000"  # versions i32 [2, 2]
    "a6 74696d696e67" + "93 cb 3ff8000000000000 cb 3fe0000000000000 cb 3fd0000000000000"  # timing f64
)
GROUP_BODY = bytes.fromhex(
    "01000000 02000000"  # prompt ids i32
    "03000000 04000000 2c010000"  # token ids i32
    "000000bf 000080bf 000000c0"  # log-probs f32
)
GROUP_FRAME = (
    bytes.fromhex("42 41 50 4f" + "01" + "01")  # BAPO, format 1, kind 1
    + struct.pack("<II", len(GROUP_HEADER), 32)
    + GROUP_HEADER
    + GROUP_BODY
)

BATCH = Batch(
    step=7,
    entries=(BatchEntry(origin=Origin.X3, group=GROUP),),
    r_tot=0.5,
    facts={"c2": 0.25, "num_high": 200},
    results=(
        GroupResult(
            group_id="g1",
            prompt_id="p",
            purpose=Purpose.REEVALUATE,
            policy_version=5,
            rewards=(1.0, 0.0),
            origin=None,
            reason="no_room",
            birth=6,
        ),
    ),
)
BATCH_HEADER = bytes.fromhex(
    "85"  # map of 5
    "a4 73746570" + "07"  # step: 7
    "a7 6f726967696e73" + "91 a2 7833"  # origins: [x3]
    "a5 725f746f74" + "cb 3fe0000000000000"  # r_tot: 0.5
    "a5 6661637473" + "82"  # facts: map of 2
    "a2 6332" + "cb 3fd0000000000000"  # c2: 0.25
    "a8 6e756d5f68696768" + "cc c8"  # num_high: 200
    "a7 726573756c7473" + "91 8d"  # results: [map of 13]
    "a8 67726f75705f6964" + "a2 6731"  # group_id: g1
    "a9 70726f6d70745f6964" + "a1 70"  # prompt_id: p
    "a7 707572706f7365" + "aa 72656576616c75617465"  # purpose: reevaluate
    "ae 706f6c6963795f76657273696f6e" + "05"  # policy_version: 5
    "a7 72657761726473" + "92 cb 3ff0000000000000 cb 0000000000000000"  # rewards
    "a6 6f726967696e" + "c0"  # origin: null
    "a6 726561736f6e" + "a7 6e6f5f726f6f6d"  # reason: no_room
    "a5 6269727468" + "06"  # birth: 6
    "a9 776f726b65725f6964" + "a0"  # worker_id: ""
    "aa 6e756d5f746f6b656e73" + "00"  # num_tokens: 0
    "a8 73616d706c655f73" + "cb 0000000000000000"  # sample_s
    "a7 67726164655f73" + "cb 0000000000000000"  # grade_s
    "aa 636c61696d65645f6174" + "cb 0000000000000000"  # claimed_at
)
BATCH_FRAME = (
    bytes.fromhex("42 41 50 4f" + "01" + "02")  # BAPO, format 1, kind 2
    + struct.pack("<II", len(BATCH_HEADER), len(GROUP_FRAME))
    + BATCH_HEADER
    + GROUP_FRAME
)


def test_a_group_is_packed_to_these_bytes() -> None:
    assert pack_group(GROUP).hex(" ", 4) == GROUP_FRAME.hex(" ", 4)


def test_a_batch_is_packed_to_these_bytes() -> None:
    assert pack_batch(BATCH).hex(" ", 4) == BATCH_FRAME.hex(" ", 4)


def test_a_group_that_a_teacher_has_scored_has_these_bytes_and_no_other_frame_changes() -> None:
    taught = replace(GROUP, teacher_logprobs=np.array([-0.25, -0.5, -1.0], dtype=np.float32))
    body = GROUP_BODY + bytes.fromhex("000080be 000000bf 000080bf")
    frame = GROUP_FRAME[:6] + struct.pack("<II", len(GROUP_HEADER), 44) + GROUP_HEADER + body
    assert pack_group(taught).hex(" ", 4) == frame.hex(" ", 4)
    found = unpack_group(frame).teacher_logprobs
    assert found is not None
    assert found.tolist() == [-0.25, -0.5, -1.0]
    assert unpack_group(GROUP_FRAME).teacher_logprobs is None


def test_these_bytes_are_read_as_the_group() -> None:
    group = unpack_group(GROUP_FRAME)
    assert (group.group_id, group.prompt, group.purpose, group.step) == ("g1", GROUP.prompt, Purpose.FRESH, 7)
    assert (group.label, group.worker_id, group.timing) == ("", "w0", GROUP.timing)
    assert group.prompt_token_ids.tolist() == [1, 2]
    assert group.token_ids.tolist() == [3, 4, 300]
    assert group.rollout_logprobs.tolist() == [-0.5, -1.0, -2.0]
    assert group.lengths.tolist() == [1, 2]
    assert group.rewards.tolist() == [1.0, 0.0]
    assert group.outcomes.tolist() == [0, 1]
    assert group.versions.tolist() == [[5, 5], [5, 6]]


def test_these_bytes_are_read_as_the_header() -> None:
    header = read_group_header(GROUP_FRAME)
    assert (header.lengths, header.rewards) == ((1, 2), (1.0, 0.0))
    assert (header.policy_version, header.newest_version) == (5, 6)
    assert (header.num_tokens, header.outcomes) == (3, bytes([0, 1]))


def test_these_bytes_are_read_as_the_batch() -> None:
    batch = unpack_batch(BATCH_FRAME)
    assert (batch.step, batch.r_tot, batch.facts) == (7, 0.5, {"c2": 0.25, "num_high": 200})
    assert batch.results == BATCH.results
    assert [(entry.origin, entry.group.group_id) for entry in batch.entries] == [(Origin.X3, "g1")]
