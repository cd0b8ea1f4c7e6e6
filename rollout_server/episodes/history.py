"""Which earlier turn a call continues, so that no token is tokenized again.

    rendered text of the call   <user>a+c<assistant>get a<eos><tool>37<assistant>
    text of turn 0              <user>a+c<assistant>get a<eos>                     as the engine saw and sampled it
    the rest                                                  <tool>37<assistant>  is encoded, and follows turn 0's ids

Chat templates write the history of a conversation as text, and tokenizing that text gives other tokens than were
sampled: log-probs differ by 0.2 nats and more. If the text of a call begins with the text of an earlier turn, its ids
are kept. If it does not, because the template left out the reasoning or the agent shortened the history, the call is a
fork: its ids are those of the text, and nothing is lost but compute.

Only a digest of each turn's text is kept: the texts of an episode grow with the square of its turns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bapo.core.turns import FROM_NOTHING
from rollout_server.episodes.episode import Episode

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """A call as the engine gets it."""

    parent: int
    """The turn that it continues; FROM_NOTHING."""
    context_ids: list[int]
    """Tokens after that turn."""
    token_ids: list[int]
    """All of them."""


def text_mark(text: str) -> tuple[int, bytes]:
    """Length and digest of a text."""
    return len(text), hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).digest()


def continuation_of(
    episode: Episode, text: str | None, token_ids: Sequence[int], encode: Callable[[str], list[int]]
) -> Continuation:
    """Where in the episode a call continues.

    Args:
        text: the rendered prompt; None for a client that sent ids.
        token_ids: what the server made of it: used where nothing earlier fits.
        encode: token ids of a piece of text, without special tokens before or after it.
    """
    whole = list(token_ids)
    if text is None:
        paths = sorted(
            ((episode.path_of(turn), turn) for turn in range(len(episode.turns))), key=lambda one: -len(one[0])
        )
        for path, turn in paths:
            if whole[: len(path)] == path:
                return Continuation(parent=turn, context_ids=whole[len(path) :], token_ids=whole)
        return Continuation(parent=FROM_NOTHING, context_ids=whole, token_ids=whole)
    for turn in sorted(range(len(episode.turns)), key=lambda turn: -episode.turns[turn].text_chars):
        earlier = episode.turns[turn]
        if len(text) >= earlier.text_chars and text_mark(text[: earlier.text_chars])[1] == earlier.text_digest:
            rest = encode(text[earlier.text_chars :]) if len(text) > earlier.text_chars else []
            return Continuation(parent=turn, context_ids=rest, token_ids=episode.path_of(turn) + rest)
    return Continuation(parent=FROM_NOTHING, context_ids=whole, token_ids=whole)
