"""A prompt has the token ids that the model's users send it: special tokens once, and none after the question."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from bapo.core.types import MESSAGES, Prompt
from bapo.tasks.base import make_prompt
from bapo.tasks.prompt_tokens import ended_prompts, prompt_token_ids, round_trips_of
from tests.support.tasks import maker
from tests.support.tiny_model import write_tokenizer

make_task = maker("dataset")

EOS, BOS = 1, 2
QUESTION = [4, 204, 5, 212]
"""0+1: (numbers begin at 4, + - * / ( ) = , : at 204)."""
ASK = "{% for m in messages %}{{ m.content }}{% endfor %}"
TEMPLATES = {
    "without BOS": (ASK, QUESTION),
    "with BOS": ("{{ bos_token }}" + ASK, [BOS, *QUESTION]),
    "BOS after a text": ("|{{ bos_token }}" + ASK, [214, BOS, *QUESTION]),
    "with a beginning of the answer": (ASK + "{% if add_generation_prompt %}<answer>{% endif %}", [*QUESTION, 216]),
    "with EOS between turns": ("{{ bos_token }}" + ASK + "{{ eos_token }}=", [BOS, *QUESTION, EOS, 210]),
}
ADDED = {"nothing": "", "BOS": "<bos> $A", "BOS and EOS": "<bos> $A <eos>", "EOS": "$A <eos>"}


def write_adding(folder: Path, added: str, **settings: Any) -> None:
    """A tokenizer that adds special tokens around a text."""
    folder.mkdir()
    write_tokenizer(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    if added:
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"Sequence": {"id": "A", "type_id": 0}}
                if part == "$A"
                else {"SpecialToken": {"id": part, "type_id": 0}}
                for part in added.split()
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {
                name: {"id": name, "ids": [number], "tokens": [name]} for name, number in (("<bos>", 2), ("<eos>", 1))
            },
        }
    path.write_text(json.dumps(tokenizer))
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))


def asked(tmp_path: Path, row: dict[str, Any], **options: Any) -> Prompt:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (prompt,) = make_task(path=str(path), tokenizer=str(tmp_path / "model"), **options).prompts("train")
    return prompt


@pytest.mark.parametrize("added", ADDED.values(), ids=ADDED)
@pytest.mark.parametrize(("template", "expected"), TEMPLATES.values(), ids=TEMPLATES)
def test_a_prompt_of_a_chat_template_has_the_ids_of_transformers_and_no_more(
    tmp_path: Path, template: str, expected: list[int], added: str
) -> None:
    write_adding(tmp_path / "model", added, chat_template=template)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    messages = [{"role": "user", "content": "0+1:"}]
    prompt = asked(tmp_path, {"prompt": messages, "answer": "1"})
    assert prompt_token_ids(tokenizer, prompt) == expected
    theirs = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
    assert theirs["input_ids"] == expected
    assert ended_prompts(tokenizer, [prompt]) == ""


@pytest.mark.parametrize(
    ("added", "expected"), list(zip(ADDED.values(), [[], [BOS], [BOS, EOS], [EOS]], strict=True)), ids=ADDED
)
def test_other_texts_get_the_tokens_that_the_tokenizer_adds_and_a_warning_if_they_end_with_eos(
    tmp_path: Path, added: str, expected: list[int]
) -> None:
    write_adding(tmp_path / "model", added, chat_template=ASK)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = [*[BOS] * (BOS in expected), *QUESTION, *[EOS] * (EOS in expected)]
    plain = asked(tmp_path, {"prompt": "0+1:", "answer": "1"})
    formatted = asked(
        tmp_path, {"prompt": [{"role": "user", "content": "0+1:"}], "answer": "1"}, message_format="{content}"
    )
    for prompt in (plain, formatted):
        assert prompt_token_ids(tokenizer, prompt) == text
        assert ("the tokenizer adds" in ended_prompts(tokenizer, [prompt])) == (EOS in expected)
        assert round_trips_of(tokenizer, [prompt]).num_changed == 0


def test_bos_that_a_text_begins_with_is_not_doubled(tmp_path: Path) -> None:
    write_adding(tmp_path / "model", "<bos> $A")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert prompt_token_ids(tokenizer, make_prompt("t", "<bos>0+1:", {})) == [BOS, *QUESTION]
    assert prompt_token_ids(tokenizer, make_prompt("t", "0+1:<bos>", {})) == [BOS, *QUESTION, BOS]


def test_a_task_of_ones_own_says_that_a_template_wrote_its_prompts(tmp_path: Path) -> None:
    write_adding(tmp_path / "model", "<bos> $A <eos>")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text, ready = make_prompt("t", "0+1:", {"a": 1}), make_prompt("t", "0+1:", {"a": 1}, templated=True)
    assert text.prompt_id == ready.prompt_id
    assert prompt_token_ids(tokenizer, text) == [BOS, *QUESTION, EOS]
    assert prompt_token_ids(tokenizer, ready) == QUESTION


def test_a_conversation_stored_by_an_earlier_version_was_written_by_a_template(tmp_path: Path) -> None:
    write_adding(tmp_path / "model", "<bos> $A <eos>")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    stored = Prompt(
        prompt_id="p", text="0+1:", task="dataset", answer={MESSAGES: [{"role": "user", "content": "0+1:"}]}
    )
    assert prompt_token_ids(tokenizer, stored) == QUESTION


def test_prompts_that_end_with_eos_by_themselves_are_named_with_the_cause(tmp_path: Path) -> None:
    write_adding(tmp_path / "model", "", chat_template=ASK + "{{ eos_token }}")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    complaint = ended_prompts(tokenizer, [asked(tmp_path, {"prompt": "0+1:<eos>", "answer": "1"})])
    assert "the prompts contain it" in complaint
    conversation = asked(tmp_path, {"prompt": [{"role": "user", "content": "0+1:"}], "answer": "1"})
    assert "the chat template writes it" in ended_prompts(tokenizer, [conversation])
    assert ended_prompts(tokenizer, [make_prompt("t", "0+1:", {})]) == ""


@pytest.fixture(params=[None, True, False], ids=["no flag", "add_bos_token", "no add_bos_token"])
def sentencepiece_like(request: pytest.FixtureRequest, tmp_path: Path) -> PreTrainedTokenizerBase:
    """Llama's class over a vocabulary with the sign of a word's beginning, with or without tokenizer.json's BOS."""
    folder = tmp_path / "model"
    folder.mkdir()
    words = ["<unk>", "<s>", "</s>", "\u2581", *"0123456789+:[]INST/"]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": word, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}
            for i, word in enumerate(words[:3])
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False},
        "decoder": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False},
        "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(words)}, "merges": []},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    flag = {} if request.param is None else {"add_bos_token": request.param}
    template = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
    settings = {"tokenizer_class": "LlamaTokenizer", "chat_template": template, **flag}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return found


def test_tokenizers_that_add_bos_by_a_flag_add_it_to_texts_alone(
    tmp_path: Path, sentencepiece_like: PreTrainedTokenizerBase
) -> None:
    messages = [{"role": "user", "content": "0+1:"}]
    prompt = asked(tmp_path, {"prompt": messages, "answer": "1"})
    assert prompt.text == "<s>[INST] 0+1: [/INST]"
    theirs = sentencepiece_like.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
    ids = prompt_token_ids(sentencepiece_like, prompt)
    assert ids == theirs["input_ids"]
    assert ids.count(1) == 1
    plain = asked(tmp_path, {"prompt": "0+1:", "answer": "1"})
    assert prompt_token_ids(sentencepiece_like, plain) == sentencepiece_like.encode("0+1:")
