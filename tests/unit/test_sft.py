"""Supervised fine-tuning: which tokens train, in which order, and what their loss is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo.config.tree import Config
from bapo.core.codec import unpack_batch
from bapo.core.errors import ConfigError
from bapo.core.types import Group
from learner.model.policy import load_policy
from learner.sft_data import SftData, conversations
from learner.update.update import Updater
from tests.support.episodes import histories_of
from tests.support.learner import ALONE

LOOKUP = "models/lookup-tiny"
"""`<|user|>a+b<|assistant|>...<eos><|tool|>37<|assistant|>...<eos>`"""
GET = '<tool_call>{"name": "get", "arguments": {"key": "a"}}</tool_call>'
CHAT = [
    {"role": "user", "content": "a+b"},
    {"role": "assistant", "content": GET},
    {"role": "tool", "content": "37"},
    {"role": "assistant", "content": "<answer>42</answer>"},
]


def write(folder: Path, *rows: Any) -> str:
    path = folder / "data.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def config_of(data: str, *, num_steps: int = 1, epochs: int = 1, **learner: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"num_steps": num_steps, "seed": 3},
            "model": {"path": LOOKUP},
            "algorithm": {"batch_size": 4},
            "cadence": {"max_steps_ahead": 0},
            "loss": {
                "name": "sft", "ratio_mode": "direct", "importance_level": "none", "aggregation": "token_mean",
                "kl_coef": 0.0, "entropy_coef": 0.0,
            },
            "learner": {"minibatch_size": 4, "device": "cpu", "port": 0, "warmup_steps": 0, **learner},
            "sft": {"data": data, "epochs": epochs},
        }
    )  # fmt: skip


def groups_of(data: SftData, step: int = 1) -> list[Group]:
    return [entry.group for entry in unpack_batch(data.batch_frame(step, timeout_s=0)).entries]


def texts(group: Group) -> list[tuple[str, str]]:
    """(what came before, what trains) of each turn."""
    tokenizer = AutoTokenizer.from_pretrained(LOOKUP)
    return [(tokenizer.decode(before), tokenizer.decode(own)) for before, own in histories_of(group, 0)]


def test_messages_of_the_assistant_train_and_all_else_is_context(tmp_path: Path) -> None:
    (group,) = groups_of(SftData(config_of(write(tmp_path, {"messages": CHAT}))))
    start = "<|user|>a+b<|assistant|>"
    assert [tuple(part.replace(" ", "") for part in turn) for turn in texts(group)] == [
        (start, GET.replace(" ", "") + "<eos>"),
        (f"{start}{GET}<eos><|tool|>37<|assistant|>".replace(" ", ""), "<answer>42</answer><eos>"),
    ]
    assert group.turns is not None
    assert group.turns[:, 1].tolist() == [-1, 0], "one history"


def test_a_template_that_changes_the_past_gives_each_message_the_history_that_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(LOOKUP)
    # Of earlier messages of the assistant it shows nothing.
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{% if loop.last %}{{ m.content }}<eos>"
        "{% endif %}{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda _: tokenizer)
    rows = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "12"}]
    (group,) = groups_of(SftData(config_of(write(tmp_path, {"messages": rows + rows}))))
    assert group.turns is not None
    assert group.turns[:, 1].tolist() == [-1, -2]
    assert texts(group) == [
        ("<|user|>a<|assistant|>", "12<eos>"),
        ("<|user|>a<|assistant|><|user|>a<|assistant|>", "12<eos>"),
    ]


@pytest.mark.parametrize(("end", "is_said"), [("<eos>", False), ("<|tool|>", True)])
def test_a_template_that_ends_messages_with_another_token_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, end: str, is_said: bool
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(LOOKUP)
    tokenizer.chat_template = (
        "{% for m in messages %}<|user|>{{ m.content }}"
        + end
        + "{% endfor %}{% if add_generation_prompt %}<|user|>{% endif %}"
    )
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda path: tokenizer)
    SftData(config_of(write(tmp_path, {"messages": CHAT[:2]})))
    assert ("without the end-of-sequence token '<eos>'" in caplog.text) is is_said


def test_a_completion_ends_with_the_end_of_sequence(tmp_path: Path) -> None:
    (group,) = groups_of(SftData(config_of(write(tmp_path, {"prompt": "a+b", "completion": "12"}))))
    assert [tuple(part.replace(" ", "") for part in turn) for turn in texts(group)] == [("a+b", "12<eos>")]


def rows_of(num: int) -> list[dict[str, str]]:
    return [{"prompt": "a", "completion": str(i)} for i in range(num)]


def test_each_epoch_has_every_conversation_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    data = SftData(config_of(write(tmp_path, *rows_of(10)), num_steps=6, epochs=2))
    steps = [[group.group_id for group in groups_of(data, step)] for step in range(1, 7)]
    assert [len(step) for step in steps] == [4, 3, 3, 4, 3, 3]
    first, second = ([name for step in half for name in step] for half in (steps[:3], steps[3:]))
    assert sorted(first) == sorted(second) == [f"sft-{i:08d}" for i in range(1, 11)]
    assert first != second
    again = SftData(config_of(str(tmp_path / "data.jsonl"), num_steps=6, epochs=2))
    assert [group.group_id for group in groups_of(again, 5)] == steps[4]


def test_the_loss_is_the_mean_negative_log_likelihood_of_the_trained_tokens(tmp_path: Path) -> None:
    config = config_of(write(tmp_path, {"messages": CHAT}, *rows_of(3)), lr=1e-3)
    data = SftData(config)
    model = AutoModelForCausalLM.from_pretrained(LOOKUP, dtype=torch.float32)
    values: list[float] = []
    for group in groups_of(data):
        for before, own in histories_of(group, 0):
            with torch.no_grad():
                logits = model(torch.tensor([before + own])).logits[0]
            found = logits.log_softmax(-1)[len(before) - 1 : -1]
            values += [-found[i, token].item() for i, token in enumerate(own)]
    batch = unpack_batch(data.batch_frame(1, timeout_s=0))
    policy = load_policy(LOOKUP, config, ALONE)
    updater = Updater(config=config, policy=policy, world=ALONE, run_path=tmp_path, **_rest())
    first = updater.run(batch)
    assert first.minibatches[0].loss == pytest.approx(np.mean(values), rel=1e-4)
    assert updater.run(batch).minibatches[0].loss < first.minibatches[0].loss


def _rest() -> dict[str, Any]:
    from learner.distributed.stopping import StopFlag

    return {"stop": StopFlag(), "images": None}


def test_conversations_that_are_too_long_are_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = {"prompt": "a", "completion": " ".join(["7"] * 200)}
    data = SftData(config_of(write(tmp_path, *rows_of(2), long), microbatch_tokens=150))
    assert len(groups_of(data)) == 2
    assert "1 of 3 conversations are longer than learner.microbatch_tokens = 150" in caplog.text
    with pytest.raises(ConfigError, match="no conversation of at most"):
        SftData(config_of(write(tmp_path, long), microbatch_tokens=150))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "2: not JSON"),
        ("[1]", "2: expected"),
        ({"messages": CHAT[:1]}, "a message of the assistant"),
        ({"messages": [{"role": "assistant", "content": None}]}, "with texts"),
        ({"prompt": "a"}, '"completion"'),
    ],
)
def test_a_row_that_cannot_train_is_refused_with_its_line(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(conversations(write(tmp_path, {"prompt": "a", "completion": "1"}, row)))
