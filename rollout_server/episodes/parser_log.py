"""vLLM's parsers of tool calls log a traceback for each call that the policy has written wrongly: counted here instead.

A policy that learns writes many of them; its agent reads such a call as text, and the reward says the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

PARSERS = ("vllm.tool_parsers", "vllm.parser", "vllm.reasoning")


class ParserFilter(logging.Filter):
    """Passes the first malformed call, as one line."""

    def __init__(self, count: Callable[[], object]) -> None:
        """`count`: called for each of them."""
        super().__init__()
        self._count, self._is_first = count, True

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is written."""
        if not record.exc_info:
            return True
        self._count()
        cause = record.exc_info[1]
        record.msg = "malformed call of a tool, which its agent reads as text (%s: %s); further ones are only counted"
        record.args = (type(cause).__name__, str(cause)[:200])
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        is_first, self._is_first = self._is_first, False
        return is_first


def quiet_parsers(count: Callable[[], object]) -> None:
    """For the parsers of vLLM that this process has loaded."""
    found = ParserFilter(count)
    for name in [name for name in logging.root.manager.loggerDict if name.startswith(PARSERS)]:
        logging.getLogger(name).addFilter(found)
