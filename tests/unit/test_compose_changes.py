"""Which changes bring the images up for real."""

from __future__ import annotations

import pytest

from tests.full.compose.changes import reason


def diff(path: str, *lines: str) -> str:
    return "\n".join([f"diff --git a/{path} b/{path}", f"--- a/{path}", f"+++ b/{path}", "@@ -1 +1 @@", *lines])


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("requirements/services.txt", "-tokenizers==1"),
        ("deploy/docker/buffer.Dockerfile", "+COPY x x"),
        ("docker-compose.yml", "+  x: y"),
        (".dockerignore", "+models"),
        (".env.example", "+A=1"),
        ("pyproject.toml", "+x = 1"),
        ("services/evaluator/majority.py", "+from tokenizers import Tokenizer"),
        ("bapo/tasks/chat.py", "-    import jinja2"),
        ("learner/loop.py", '+    hub = importlib.import_module("huggingface_hub")'),
    ],
)
def test_what_an_image_depends_on_is_seen(path: str, line: str) -> None:
    assert reason(diff("docs/faq.md", "+import this") + "\n" + diff(path, line)) == path


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("services/evaluator/majority.py", "+    return 0.0"),
        ("services/evaluator/majority.py", "+    # an import of ours"),
        ("tests/unit/test_types.py", "+import numpy"),
        ("docs/cluster.md", "+from here"),
        ("deploy/grafana/dashboards/run.json", "+{}"),
    ],
)
def test_what_changes_no_image_is_not(path: str, line: str) -> None:
    assert reason(diff(path, line)) == ""
