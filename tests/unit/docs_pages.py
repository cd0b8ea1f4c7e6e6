"""What the pages of the documentation contain: code blocks, command lines, headings, links."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
ALL_PAGES = [*PAGES, *sorted((REPOSITORY / "docs" / "adr").glob("*.md"))]

SHELL = {"", "sh", "bash", "shell", "console"}
"""Languages of blocks that somebody types; what is none of it says so (`text`, `toml`, `python`)."""
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True)
class Block:
    """One block of code: fenced, or indented by four spaces."""

    page: str
    language: str
    text: str


def blocks(path: Path) -> list[Block]:
    """All blocks of a page."""
    text, page = path.read_text(encoding="utf-8"), path.relative_to(REPOSITORY).as_posix()
    found = [
        Block(page, match[1], match[2]) for match in re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", text, re.M | re.S)
    ]
    rest = re.sub(r"^```.*?^```\s*$", "", text, flags=re.M | re.S)
    indented = re.findall(r"(?:^\n)((?: {4}\S[^\n]*\n?)(?: {4}[^\n]*\n?)*)", rest, re.M)
    return found + [Block(page, "", re.sub(r"^ {4}", "", block, flags=re.M)) for block in indented]


def lines_of(block: Block) -> list[str]:
    """Lines that a reader types, each whole, without prompt sign and comment.

    Where a block has prompt signs, the lines without one are what the programs answer.
    """
    found: list[str] = []
    has_prompts = re.search(r"^\$ ", block.text, re.M) is not None
    is_open = False
    for line in re.sub(r"\s*\\\n\s*", " ", block.text).splitlines():
        bare = re.split(r"(?:^|\s)#(?:\s|$)", line)[0].rstrip()
        if is_open:
            found[-1] += f" {bare.strip()}"
        elif bare.startswith("$ ") or not has_prompts:
            found.append(bare.removeprefix("$ "))
        else:
            continue
        is_open = not _is_whole(found[-1])
    return [line for line in found if line.strip()]


def _is_whole(line: str) -> bool:
    """Whether its quotes are closed."""
    try:
        shlex.split(line)
    except ValueError:
        return False
    return True


def parts_of(line: str) -> list[str]:
    """`X=1 sudo a b && c | d` -> `a b`, `c`, `d`; words that explain it, after two spaces, are left out."""
    pieces = re.split(r"""("[^"]*"|'[^']*')""", line)  # every second one is quoted, and kept as it is
    for place in range(0, len(pieces), 2):
        pieces[place] = re.sub(r"\s*(?:&&|\||;|&$)\s*", "\n", re.sub(r"(?<=\S)\s{2,}(?=\S).*", "\0", pieces[place]))
    return [command for part in "".join(pieces).partition("\0")[0].splitlines() if (command := _bare(part))]


def _bare(part: str) -> str:
    """Without variables and sudo in front of it."""
    words = part.strip().split(" ")
    while words and (words[0] == "sudo" or ASSIGNMENT.match(words[0])):
        words.pop(0)
    return " ".join(words)


def program(command: str) -> str:
    """`.venv/bin/python -m x` -> `python`."""
    name = command.split(" ")[0]
    last = name.rsplit("/", 1)[-1] if "/bin/" in name else name
    return "python" if re.fullmatch(r"python3(\.\d+)?", last) else last


def commands(path: Path) -> list[str]:
    """Every command of the shell blocks of a page, whatever its program is."""
    lines = [line for block in blocks(path) if block.language in SHELL for line in lines_of(block)]
    return [command for line in lines for command in parts_of(line)]


def slugs(path: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```\s*$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.*)$", text, re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        number = 0
        while (name := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(name)
    return found


def links(path: Path) -> list[str]:
    """Targets of links and images that are no URL."""
    text = re.sub(r"^```.*?^```\s*$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text))
    return [target for target in found if not re.match(r"\w+:", target)]
