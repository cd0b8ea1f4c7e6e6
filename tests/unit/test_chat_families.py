"""Templates in the style of public models: text and token ids are those of transformers, also of conversations to
continue. Templates and files are written for this test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from bapo.core.errors import ConfigError
from bapo.tasks.base import make_prompt
from bapo.tasks.chat import chat_template
from bapo.tasks.prompt_tokens import prompt_token_ids
from tests.support.tiny_model import write_tokenizer

TEMPLATES = Path(__file__).parents[1] / "support" / "chat_templates"
FAMILIES = {path.stem: path.read_text() for path in sorted(TEMPLATES.glob("*.jinja"))}
ASK = [{"role": "user", "content": " 0+1 = <b>é?\n"}]
CONVERSATIONS = {
    "a question": ASK,
    "with a system message": [{"role": "system", "content": "Be brief.\n"}, *ASK],
    "of several turns": [*ASK, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n1 "}, *ASK],
    "to continue": [*ASK, {"role": "assistant", "content": "Let me think. <think>"}],
    "to continue behind a space": [*ASK, {"role": "assistant", "content": "\nIt is "}],
    "to continue behind a thought": [*ASK, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt is"}],
    "to continue from nothing": [*ASK, {"role": "assistant", "content": ""}],
}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a + b", "parameters": {"a": "é"}}}]


def write_files(folder: Path, *, tokens: dict[str, Any] | None, mapped: dict[str, Any] | None, **settings: Any) -> None:
    """A tokenizer's files.

    Args:
        tokens: special tokens of tokenizer_config.json; None: those of the tiny tokenizer.
        mapped: special_tokens_map.json.
    """
    folder.mkdir()
    write_tokenizer(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    if tokens is not None:
        config = {name: value for name, value in config.items() if not name.endswith("_token")} | tokens
    path.write_text(json.dumps(config | settings))
    if mapped is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(mapped))


def expected(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], **options: Any
) -> tuple[str, list[int]]:
    """What transformers gives."""
    is_open = messages[-1]["role"] == "assistant"
    options |= {"add_generation_prompt": not is_open, "continue_final_message": is_open}
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return text, tokenizer.apply_chat_template(messages, tokenize=True, **options)["input_ids"]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "with a variable": {"enable_thinking": False},
    "with tools": {"tools": TOOLS, "documents": [{"title": "t", "text": "x"}]},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("tokenizer") / "model"
    write_files(folder, tokens=None, mapped=None)
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return found


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("template", FAMILIES.values(), ids=FAMILIES)
def test_text_and_ids_are_those_of_transformers(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, template: str, options: dict[str, Any]
) -> None:
    write_files(tmp_path / "model", tokens=None, mapped=None, chat_template=template)
    render = chat_template(str(tmp_path / "model"), options)
    assert render is not None
    for messages in CONVERSATIONS.values():
        try:
            text, token_ids = expected(tokenizer, messages, chat_template=template, **options)
        except ValueError:  # the message cannot be continued
            with pytest.raises(ConfigError, match=r"is to be continued, and its format changes or omits"):
                render(messages)
            continue
        assert render(messages) == text
        assert prompt_token_ids(tokenizer, make_prompt("t", text, {}, templated=True)) == token_ids


TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "image_token")
NAMES = (*TOKENS, "extra_special_tokens", "additional_special_tokens", "tools", "documents")
SHOWN = (
    "".join(f"{{% if {name} is defined %}}{name}={{{{ {name} }}}};{{% endif %}}" for name in NAMES)
    + "{{ tools is none }}{{ documents is none }}{{ tools is defined }}"
)
FILES: dict[str, dict[str, Any]] = {
    "only in the map": {
        "tokens": {},
        "mapped": {
            "bos_token": "<bos>",
            "eos_token": {
                "content": "<eos>",
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "single_word": False,
            },
        },
    },
    "in the map otherwise than in the config": {"tokens": {"eos_token": "<pad>"}, "mapped": {"eos_token": "<eos>"}},
    "in the map, which the config overrides": {
        "tokens": {"eos_token": "<pad>"},
        "mapped": {"eos_token": "<eos>", "bos_token": "<bos>"},
        "added_tokens_decoder": {
            "0": {
                "content": "<pad>",
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
        },
    },
    "defaults of Llama's class": {"tokens": {}, "mapped": None, "tokenizer_class": "LlamaTokenizer"},
    "defaults of Llama's class, BOS null": {
        "tokens": {"bos_token": None},
        "mapped": None,
        "tokenizer_class": "LlamaTokenizerFast",
    },
    "defaults of Qwen's class": {"tokens": {}, "mapped": None, "tokenizer_class": "Qwen2Tokenizer"},
    "defaults of Gemma's class": {
        "tokens": {"eos_token": "<eos>"},
        "mapped": None,
        "tokenizer_class": "GemmaTokenizer",
    },
    "defaults of GPT-2's class": {"tokens": {}, "mapped": None, "tokenizer_class": "GPT2Tokenizer"},
    "no class": {"tokens": {}, "mapped": None, "tokenizer_class": None},
    "added tokens": {
        "tokens": {
            "eos_token": {
                "__type": "AddedToken",
                "content": "<eos>",
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
        },
        "mapped": None,
    },
    "tokens of images": {"tokens": {"image_token": "<unk>", "eos_token": "<eos>"}, "mapped": None},
    "named extra tokens": {"tokens": {"extra_special_tokens": {"image_token": "<unk>"}}, "mapped": None},
    "listed extra tokens": {"tokens": {"additional_special_tokens": ["<unk>"], "eos_token": "<eos>"}, "mapped": None},
}


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_a_template_sees_the_special_tokens_that_transformers_shows_it(tmp_path: Path, files: dict[str, Any]) -> None:
    folder = tmp_path / "model"
    write_files(folder, chat_template=SHOWN, **files)
    render = chat_template(str(folder), {})
    assert render is not None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert render(ASK) == tokenizer.apply_chat_template(ASK, tokenize=False, add_generation_prompt=True)


def test_separators_that_only_the_special_tokens_map_names_are_written(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    mapped = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    write_files(tmp_path / "model", tokens={}, mapped=mapped, chat_template=template)
    render = chat_template(str(tmp_path / "model"), {})
    assert render is not None
    assert render([{"role": "user", "content": "0+1:"}]) == "<bos>0+1:<eos>"


def test_a_default_that_nobody_can_be_asked_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(
        tmp_path / "a", tokens={}, mapped=None, tokenizer_class="LlamaTokenizer", chat_template="{{ bos_token }}"
    )
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"uses bos_token, which neither .* Write it to tokenizer_config.json"):
        chat_template(str(tmp_path / "a"), {})
    write_files(tmp_path / "b", tokens={}, mapped=None, chat_template="{{ bos_token }}|")
    render = chat_template(str(tmp_path / "b"), {})
    assert render is not None
    assert render(ASK) == "|"


NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}, {"name": "rag", "template": "R"}]


@pytest.mark.parametrize("given", [NAMED, {one["name"]: one["template"] for one in NAMED}], ids=["list", "map"])
def test_of_several_templates_the_default_is_taken_and_with_tools_that_for_tools(tmp_path: Path, given: Any) -> None:
    folder = tmp_path / "model"
    write_files(folder, tokens=None, mapped=None, chat_template=given)
    for options, text in (({}, "D"), ({"tools": TOOLS}, "T"), ({"tools": None}, "D")):
        render = chat_template(str(folder), options)
        assert render is not None
        assert render(ASK) == text
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("T2")
    with pytest.raises(ConfigError, match=r"templates of .* are tool_use, and none is 'default'"):
        chat_template(str(folder), {})
    (folder / "chat_template.jinja").write_text("D2")
    for options, text in (({}, "D2"), ({"tools": TOOLS}, "T2")):
        render = chat_template(str(folder), options)
        assert render is not None
        assert (
            render(ASK)
            == text
            == AutoTokenizer.from_pretrained(folder).apply_chat_template(ASK, tokenize=False, **options)
        )


@pytest.mark.parametrize("option", ["messages", "add_generation_prompt", "continue_final_message"])
def test_variables_that_follow_from_the_conversation_cannot_be_set(tmp_path: Path, option: str) -> None:
    write_files(tmp_path / "model", tokens=None, mapped=None, chat_template="x")
    with pytest.raises(ConfigError, match=rf"chat_options: {option} cannot be set"):
        chat_template(str(tmp_path / "model"), {option: True})
