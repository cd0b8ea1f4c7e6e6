"""A tokenizer that normalises is the model's; one that changes most prompts is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from bapo.runtime.model_files import round_trips

OHM, OMEGA = "\u2126", "\u03a9"
ANGSTROM, A_RING = "\u212b", "\u00c5"
DECOMPOSED, COMPOSED = "e\u0301", "\u00e9"


@pytest.fixture
def qwen_like() -> Callable[[str], str]:
    """One token per character, after NFC, as Qwen's tokenizers normalise."""
    known = ["<unk>", *"0123456789 ", OMEGA, A_RING, COMPOSED]
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(known)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return lambda text: tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)


def test_prompts_that_nfc_alone_changes_survive(qwen_like: Callable[[str], str]) -> None:
    assert qwen_like(f"3 {OHM}") == f"3 {OMEGA}", "the tokenizer does change it"
    found = round_trips([f"3 {OHM}", f"5 {ANGSTROM}", f"1{DECOMPOSED}", "12"], qwen_like)
    assert (found.num_prompts, found.num_changed, found.is_wrong) == (4, 0, False)


def test_a_few_prompts_that_change_are_told_with_their_share(qwen_like: Callable[[str], str]) -> None:
    found = round_trips(["12", "3x", "4", "5"], qwen_like)
    assert not found.is_wrong
    assert found.complaint.startswith(
        "the tokenizer of the model changes the prompt '3x' to '3<unk>' (1 of 4 tested prompts"
    )
    assert "25%" in found.complaint
    assert "trained with" not in found.complaint


def test_a_tokenizer_that_changes_most_prompts_is_not_the_models(qwen_like: Callable[[str], str]) -> None:
    found = round_trips(["1+1", "2+2", "3"], qwen_like)
    assert found.is_wrong
    assert "2 of 3" in found.complaint
    assert "its vocabulary has no tokens for this text" in found.complaint  # 1<unk>1
    reversing = round_trips(["12", "34", "5"], lambda text: text[::-1])
    assert "it is not the tokenizer that the model was trained with" in reversing.complaint


def test_half_is_not_most_and_none_is_fine(qwen_like: Callable[[str], str]) -> None:
    assert not round_trips(["1+1", "2"], qwen_like).is_wrong
    assert not round_trips([], qwen_like).is_wrong
