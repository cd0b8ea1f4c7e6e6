"""Tokenizer and chat template of `lookup-tiny`: a tool call is a few tokens, and reads as the `hermes` format.

    <|user|>a+b<|assistant|><tool_call>{"name": "get", "arguments": {"key": "a"}}</tool_call><eos><|tool|>37...

The JSON around an argument is one token, so that the model cannot write it wrong and stock parsers of tool calls read
it. The template writes a call in the same characters as the model did: a history then begins with what was sampled.
Tokens of roles are special, so they are no part of a message's text; those of tool calls are not.
"""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerFast

from bapo.tasks.countdown import ANSWER_END, ANSWER_START, MAX_VALUE
from contrib.lookup import agent
from contrib.lookup.task import KEYS
from models.tokenizer import BOS, EOS, PAD, UNKNOWN, build_tokenizer

SYSTEM, USER, ASSISTANT, TOOL = ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CALL_START, CALL_END = "<tool_call>", "</tool_call>"
ARGUMENT_START = {
    name: f'{{"name": "{name}", "arguments": {{"{argument}": "' for name, (_, argument) in agent.RUNS.items()
}
ARGUMENT_END = '"}}'
ERRORS = (agent.UNKNOWN_KEY, agent.UNKNOWN_TOOL, agent.INVALID_EXPRESSION, agent.INVALID_ARGUMENTS)
SYMBOLS = ("+", "-", "=", ";", ",", ":", ANSWER_START, ANSWER_END)
SCAFFOLDS = (CALL_START, CALL_END, *ARGUMENT_START.values(), ARGUMENT_END)
VOCABULARY = (
    *(PAD, EOS, BOS, UNKNOWN),
    *map(str, range(MAX_VALUE + 1)),
    *KEYS,
    *SYMBOLS,
    *ROLES,
    *SCAFFOLDS,
    *ERRORS,
)
"""The index is the id."""

WORD_PATTERN = "|".join((*map(re.escape, (ANSWER_START, ANSWER_END, *SCAFFOLDS, *ERRORS)), "[0-9]+", "[^0-9]"))
"""One match is one token; the tokenizer splits at special tokens before."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' + (message['content'] or '') -}}
{%- if message['role'] == 'assistant' -%}
{%- for call in message['tool_calls'] or [] -%}
{%- set arguments = call['function']['arguments'] -%}
{{- '<tool_call>{"name": "' + call['function']['name'] + '", "arguments": ' -}}
{{- (arguments if arguments is string else arguments | tojson) + '}</tool_call>' -}}
{%- endfor -%}
{{- '<eos>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
"""Arguments are JSON text or what it says; engines read it before they call the template."""

ROUND_TRIPS = {
    "<|user|>a+c-b<|assistant|>": [USER, "a", "+", "c", "-", "b", ASSISTANT],
    '<tool_call>{"name": "get", "arguments": {"key": "a"}}</tool_call><eos><|tool|>37<|assistant|>': [
        *(CALL_START, ARGUMENT_START["get"], "a", ARGUMENT_END, CALL_END, EOS, TOOL, "37", ASSISTANT)
    ],
    'b=50;<tool_call>{"name": "calc", "arguments": {"expression": "12+34"}}</tool_call><eos>': [
        *("b", "=", "50", ";", CALL_START, ARGUMENT_START["calc"], "12", "+", "34", ARGUMENT_END, CALL_END, EOS)
    ],
    "<|tool|>unknown key<|assistant|>37+5=42;<answer>42</answer><eos>": [
        *(TOOL, "unknown key", ASSISTANT, "37", "+", "5", "=", "42", ";", ANSWER_START, "42", ANSWER_END, EOS)
    ],
}
"""Text -> expected tokens."""


def build_lookup_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer with its template."""
    tokenizer = build_tokenizer(VOCABULARY, WORD_PATTERN)
    tokenizer.add_special_tokens({"extra_special_tokens": list(ROLES)})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
