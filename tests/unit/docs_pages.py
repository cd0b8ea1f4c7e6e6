"""What the pages of the documentation contain: code blocks, command lines, headings, links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
ALL_PAGES = [*PAGES, *sorted((REPOSITORY / "docs" / "adr").glob("*.md"))]

PROGRAMS = (
    "bapo", "make", "python", "docker", "kubectl", "helm", "kind", "curl", "pip", "pip-audit", "promtool", "ssh",
    "vllm", "cp", "export", ".venv/bin/python", ".venv/bin/bapo",
)  # fmt: skip
SHELL = {"", "sh", "bash", "shell", "console"}


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
    indented = re.findall(r"(?:^\n)((?: {4}\S[^\n]*\n?)+)", rest, re.M)
    return found + [Block(page, "", re.sub(r"^ {4}", "", block, flags=re.M)) for block in indented]


def commands(path: Path) -> list[str]:
    """Command lines of a page, without prompt sign, comment and the words that explain them."""
    found = []
    for block in blocks(path):
        if block.language not in SHELL:
            continue
        text = block.text.replace("\\\n", " ")
        for line in text.splitlines():
            bare = re.sub(r"^\$ ", "", line)
            if bare.split(" ")[0] in PROGRAMS:
                found.append(re.split(r"\s{2,}(?=\S)|\s#\s", bare)[0].strip())
    return found


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
