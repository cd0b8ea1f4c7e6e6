"""Refuse words that a reader of English stumbles over, in pages, messages, help texts and docstrings (`make lint`)."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("bapo", "buffer_service", "rollout_server", "learner", "services", "studies", "deploy")
PAGES = (
    "*.md",
    "docs/**/*.md",
    *(f"{folder}/**/*.{kind}" for folder in ("bapo", "deploy", "examples") for kind in ("md", "toml")),
    "services/dashboard/static/[!v]*/*.js",
    "docker-compose.yml",
    ".env.example",
    "Makefile",
)
INSTEAD = {
    r"go(es)? on|going on|went on": "continue, keep running, resume",
    r"behind (it|them|the (newest|latest|last|first|warm-up))": "after",
    r"ask(ed|s|ing)? (\w+ )?again": "re-sample, re-evaluate, retry",
    r"stand(s|ing)? still|standstill|stood still": "stall, stuck",
    r"so (many|long|much)(?! (as|that)\b)": "up to this many, for this long",
    r"but for|anew": "except; again",
    r"(?<!there )is no (?!longer|faster|better|larger|smaller|later|more|less)\w+": "is not a",
    r"(some|no)body|of (ours|yours)": "you, your own, built-in",
    r"mended|dear|by word of|told|lacks?": "fixed, costly, reported by, is missing",
    r"beside|learnt|all[- ]wrong": "next to, compared with; learned; all-incorrect",
}
"""Pattern -> what to write instead."""
REFUSED = re.compile("|".join(rf"\b(?:{pattern})\b" for pattern in INSTEAD), re.IGNORECASE)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of what a person reads in a file: all of a page, the strings and docstrings of a module."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.lineno, node.value
    else:
        yield 1, source


FILES = sorted(path for glob in (*PAGES, *(f"{name}/**/*.py" for name in PACKAGES)) for path in ROOT.glob(glob))


def main() -> None:
    """Print every hit as file:line: word; fail if there is one."""
    hits = [
        f"{path.relative_to(ROOT)}:{line + text.count(chr(10), 0, hit.start())}: {' '.join(hit[0].split())}"
        for path in FILES
        for line, text in texts(path)
        for hit in REFUSED.finditer(text)
    ]
    if hits:
        sys.exit("\n".join([*hits, f"write instead: {INSTEAD}"]))


if __name__ == "__main__":
    main()
