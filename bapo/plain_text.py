"""Text that somebody else wrote, made safe for a terminal and a log file."""

from __future__ import annotations


def plain(text: str) -> str:
    r"""The text with escapes in place of what a terminal obeys and a log file breaks at: `\x1b`, `\n`, `\u202e`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def plain_lines(text: str) -> str:
    """The same for text of several lines."""
    return "\n".join(map(plain, text.split("\n")))
