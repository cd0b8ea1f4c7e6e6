"""Conversations are written as the model's chat template says, exactly as transformers would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from bapo.core.errors import ConfigError
from bapo.tasks.chat import chat_template
from tests.support.tasks import maker
from tests.support.tiny_model import write_tokenizer

make_task = maker("dataset")

MESSAGES = [{"role": "system", "content": "Be <brief>."}, {"role": "user", "content": "1+1? é"}]

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}
{%- endif %}
"""
WITH_BOS = "{{ bos_token }}{% for m in messages %}\n  [{{ m['role'] }}] {{ m | tojson }}\n{% endfor %}{{ eos_token }}"
BREAKS = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
REFUSES = "{{ raise_exception('Conversation roles must alternate') }}"

INDENTED = "{% for m in messages %}{{ m | tojson(ensure_ascii=True, indent=2, sort_keys=true) }}{% endfor %}"
GENERATION = """{% for m in messages %}
    {%- if m.role == 'system' %}
        {%- generation %}{% set said = m.content %}[{{ loop.index }} {{ said }}]{% endgeneration %}

    {%- else %}{{ said is defined }} {{ m | tojson(ensure_ascii=False, indent=1, separators=(',', ':')) }}{% endif %}
{%- endfor %}"""
DATED = "{{ strftime_now('Today Date: %d %b %Y') }}{% for m in messages %}|{{ m.content }}{% endfor %}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model")
    return tmp_path / "model"


def _set_template(model: Path, template: Any) -> None:
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))


def _rendered(model: Path, **options: Any) -> str:
    render = chat_template(str(model), options)
    assert render is not None
    return render(MESSAGES)


def test_chatml_is_written_message_by_message_and_asks_for_an_answer(model: Path) -> None:
    _set_template(model, CHATML)
    assert _rendered(model) == (
        "<|im_start|>system\nBe <brief>.<|im_end|>\n<|im_start|>user\n1+1? é<|im_end|>\n<|im_start|>assistant\n"
    )
    assert _rendered(model, enable_thinking=False).endswith("assistant\n<think></think>")


@pytest.mark.parametrize("template", [CHATML, WITH_BOS, BREAKS, INDENTED, GENERATION])
def test_transformers_writes_the_same(model: Path, template: str) -> None:
    _set_template(model, template)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert _rendered(model) == tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)


def test_a_template_in_a_file_of_its_own_goes_first(model: Path) -> None:
    _set_template(model, CHATML)
    (model / "chat_template.jinja").write_text(BREAKS)
    assert _rendered(model) == "Be <brief>."


def test_a_template_that_refuses_and_one_that_is_malformed_are_told(model: Path) -> None:
    _set_template(model, REFUSES)
    with pytest.raises(ConfigError, match="Conversation roles must alternate"):
        _rendered(model)
    _set_template(model, "{% if %}")
    with pytest.raises(ConfigError, match=r"chat template of .* is malformed"):
        _rendered(model)


def test_a_prompt_with_a_date_in_it_is_the_same_prompt_tomorrow(model: Path, tmp_path: Path) -> None:
    _set_template(model, DATED)
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"prompt": MESSAGES[1:], "answer": "2"}) + "\n")
    options: dict[str, Any] = {"path": str(path), "tokenizer": str(model)}
    (prompt,) = make_task(**options).prompts("train")
    # Of the text alone, by hand: sha256 of ["dataset","Today Date: 26 Jul 2024|1+1? \\u00e9",{"answer":"2"}].
    assert (prompt.text, prompt.prompt_id) == ("Today Date: 26 Jul 2024|1+1? é", "b99c4630e85248cb")
    (dated,) = make_task(**options, chat_date="2026-11-22").prompts("train")
    assert dated.text == "Today Date: 22 Nov 2026|1+1? é"
    assert dated.prompt_id != prompt.prompt_id
    with pytest.raises(ConfigError, match=r"chat_date = '22.11.2026' is not a date: use YYYY-MM-DD"):
        make_task(**options, chat_date="22.11.2026").prompts("train")


def test_a_template_cannot_reach_python(model: Path) -> None:
    _set_template(model, "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ConfigError, match="unsafe"):
        _rendered(model)


def test_a_dataset_of_conversations_is_written_by_the_models_template(model: Path, tmp_path: Path) -> None:
    _set_template(model, CHATML)
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"prompt": MESSAGES[1:], "answer": "2"}) + "\n")
    options: dict[str, Any] = {"path": str(path), "tokenizer": str(model)}
    text = make_task(**options).prompts("train")[0].text
    assert text == "<|im_start|>user\n1+1? é<|im_end|>\n<|im_start|>assistant\n"
    assert make_task(**options, message_format="{content}|").prompts("train")[0].text == "1+1? é|"


def test_a_conversation_that_the_template_refuses_is_named_by_its_row(model: Path, tmp_path: Path) -> None:
    _set_template(model, REFUSES)
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"prompt": MESSAGES, "answer": "2"}) + "\n")
    with pytest.raises(ConfigError, match=r"train.jsonl row 1: the chat template .* roles must alternate"):
        make_task(path=str(path), tokenizer=str(model)).prompts("train")


def test_a_message_that_the_template_changes_cannot_be_continued_and_its_row_is_named(
    model: Path, tmp_path: Path
) -> None:
    _set_template(model, "{% for m in messages %}{{ m.content.split('</think>')[-1] }}|{% endfor %}")
    path = tmp_path / "train.jsonl"
    begun = [{"role": "assistant", "content": text} for text in ("<think>", "<think>so</think>It")]
    path.write_text("".join(json.dumps({"prompt": [MESSAGES[1], one], "answer": "2"}) + "\n" for one in begun))
    with pytest.raises(ConfigError, match=r"train.jsonl row 2: .*is to be continued"):
        make_task(path=str(path), tokenizer=str(model)).prompts("train")
    path.write_text(path.read_text().partition("\n")[0])
    assert make_task(path=str(path), tokenizer=str(model)).prompts("train")[0].text == "1+1? é|<think>"


def test_a_model_of_the_hub_is_read_from_its_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"cannot read tokenizer_config.json of 'owner/name'"):
        chat_template("owner/name", {})
    repository = tmp_path / "hub" / "models--owner--name"
    snapshot = repository / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    _set_template(model, BREAKS)
    (snapshot / "tokenizer_config.json").write_text((model / "tokenizer_config.json").read_text())
    render = chat_template("owner/name", {})
    assert render is not None
    assert render(MESSAGES) == "Be <brief>."
