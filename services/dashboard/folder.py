"""A folder of runs on one port: /NAME/ is the page of run NAME, / redirects to the latest run.

Each run has its own app, created at its first request; runs that are not opened are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from fastapi import FastAPI
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import Receive, Scope, Send

MakeApp = Callable[[Path, "RunFolder"], FastAPI]


class RunFolder:
    """An ASGI app over the run directories of a folder."""

    def __init__(self, folder: Path, first: str | None, make: MakeApp) -> None:
        """
        Args:
            first: the run that / redirects to; None: the latest.
            make: creates the app of a run directory.
        """
        self._folder, self._first, self._make = folder, first, make
        self._apps: dict[str, FastAPI] = {}

    def names(self) -> tuple[str, ...]:
        """The runs in the folder, latest first."""
        configs = sorted(self._folder.glob("*/config.toml"), key=lambda path: path.stat().st_mtime, reverse=True)
        return tuple(path.parent.name for path in configs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        name, slash, rest = scope["path"].lstrip("/").partition("/")
        names = self.names()
        if not name and names:
            answer = RedirectResponse(f"/{quote(self._first or names[0])}/")
            await answer(scope, receive, send)
        elif name not in names:
            await PlainTextResponse(f"no run {name[:80]!r} in {self._folder}", 404)(scope, receive, send)
        elif not slash:
            await RedirectResponse(f"/{quote(name)}/")(scope, receive, send)
        else:
            if name not in self._apps:
                self._apps[name] = self._make(self._folder / name, self)
            inner = {**scope, "path": f"/{rest}", "raw_path": quote(f"/{rest}").encode()}
            await self._apps[name](inner, receive, send)
