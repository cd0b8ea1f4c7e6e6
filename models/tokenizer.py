"""The tokenizer of the base model: every integer 0..199 is one token, so arithmetic never crosses token borders.

Decoding joins tokens without spaces, so [3][5] and [35] both read "35": train on stored token ids, never on
re-tokenised text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from bapo.tasks.countdown import ANSWER_END, ANSWER_START, MAX_VALUE

PAD, EOS, BOS, UNKNOWN = "<pad>", "<eos>", "<bos>", "<unk>"
SYMBOLS = ("+", "-", "*", "/", "(", ")", "=", ",", ":", ";", "|", "->", ANSWER_START, ANSWER_END)
VOCABULARY = (PAD, EOS, BOS, UNKNOWN, *map(str, range(MAX_VALUE + 1)), *SYMBOLS)
"""218 tokens; the index is the id."""

WORD_PATTERN = r"->|</?answer>|[0-9]+|[^0-9]"
"""One match is one token."""

ROUND_TRIPS = {
    "12,99,7->80:": ["12", ",", "99", ",", "7", "->", "80", ":"],
    "12*7=84-4=80;<answer>(12*7)-4</answer>": [
        *("12", "*", "7", "=", "84", "-", "4", "=", "80", ";"),
        *(ANSWER_START, "(", "12", "*", "7", ")", "-", "4", ANSWER_END),
    ],
}
"""Text -> expected tokens: some tokenizer classes silently split numbers into digits."""


def build_tokenizer(
    vocabulary: Sequence[str] = VOCABULARY, word_pattern: str = WORD_PATTERN
) -> PreTrainedTokenizerFast:
    """A word-level tokenizer without tokens before or after a text. The index of a token is its id."""
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split(Regex(word_pattern), behavior="isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, bos_token=BOS, unk_token=UNKNOWN
    )


def check_round_trips(folder: Path, round_trips: Mapping[str, Sequence[str]] = ROUND_TRIPS) -> None:
    """Load the saved tokenizer with AutoTokenizer and compare. Raises: ValueError naming the first difference."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text, tokens in round_trips.items():
        ids = tokenizer(text)["input_ids"]
        read = tokenizer.convert_ids_to_tokens(ids)
        if read != list(tokens):
            raise ValueError(f"{folder}: AutoTokenizer ({type(tokenizer).__name__}) reads {text!r} as {read}")
        if tokenizer.decode(ids) != text:
            raise ValueError(f"{folder}: {text!r} comes back as {tokenizer.decode(ids)!r}")
