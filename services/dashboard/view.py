"""`python -m services.dashboard.view RUN|FOLDER [--host HOST] [--port PORT] | [--export FILE]`: the page of any run.

The page can switch to the other runs of the folder, or compare with them.

Used by `bapo view` and `bapo report`. Read-only; the buffer is accessed only while the launcher of the run is alive.
With --export the page is written to one file instead. Stop it with Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

import uvicorn
from fastapi import FastAPI
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import Receive, Scope, Send

from bapo.config.load import load_resolved
from bapo.core.addresses import bare_host, http_url, reachable
from bapo.core.errors import BapoError
from bapo.runtime.auth.api_tokens import keyring_for
from bapo.runtime.auth.token_store import token_for_run
from bapo.runtime.metrics.metric import Process
from bapo.runtime.metrics.server import Telemetry
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.standard_streams import print_any_text
from bapo.transport.listen import listen
from services.dashboard.app import create_app, uvicorn_config
from services.dashboard.assets import write_export
from services.dashboard.endpoints import view_of
from services.dashboard.run_view import LiveBuffer

HOST = "127.0.0.1"
PORT = 8709
"""Not used by the processes of a run by default, so that a run can be viewed while another one trains."""


MakeApp = Callable[[Path, "RunFolder"], FastAPI]


class RunFolder:
    """An ASGI app over the run directories of a folder: /NAME/ is the page of the run NAME, / leads to the newest one.

    Each run has an app of its own, made at its first request; a run that is not opened is not read.
    """

    def __init__(self, folder: Path, first: str | None, make: MakeApp) -> None:
        """
        Args:
            first: the run that / leads to; None: the newest.
            make: the app of one run directory.
        """
        self._folder, self._first, self._make = folder, first, make
        self._apps: dict[str, FastAPI] = {}

    def names(self) -> tuple[str, ...]:
        """The runs that the folder holds now, the newest first."""
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


def serve(path: Path, host: str, port: int) -> None:
    """Serve a run and its siblings, or a folder of runs, until a signal. Raises: ConfigError for a port in use."""
    is_run = (path / "config.toml").is_file() or not any(path.glob("*/config.toml"))
    name = RunDirectory.open(path).name if is_run else path.name

    def page_of_run(directory: Path, folder: RunFolder) -> FastAPI:
        run = RunDirectory.open(directory)
        config = load_resolved(run.config_path)
        live = LiveBuffer(config, run, token=token_for_run(run.path)) if run.runs_here else None
        telemetry = Telemetry(Process.DASHBOARD, run=config.run.name)
        keyring = keyring_for("the dashboard", host, config.security.tokens)
        return create_app(view_of(run, config, live), telemetry, keyring, siblings=folder.names)

    resolved = path.resolve()
    app = RunFolder(resolved.parent if is_run else resolved, resolved.name if is_run else None, page_of_run)
    with listen(host, port, what="the dashboard", key="--port") as listener:
        host, port = listener.getsockname()[:2]
        sys.stdout.write(f"serving {name} at {http_url(reachable(host), port)}/  (stop with Ctrl-C)\n")
        sys.stdout.flush()
        uvicorn.Server(uvicorn_config(app)).run(sockets=[listener])


def main(argv: Sequence[str] | None = None) -> int:
    """Serve or export; returns the exit code."""
    print_any_text()
    parser = argparse.ArgumentParser(prog="python -m services.dashboard.view", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="a run directory, or a folder of run directories")
    parser.add_argument("--host", default=HOST, help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=PORT, help="port, 0 for a free one (default: %(default)s)")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write the page to one file that works offline")
    flags = parser.parse_args(argv)
    try:
        host = bare_host(flags.host)
    except ValueError as error:
        parser.error(f"--host: {error}")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        if flags.export is None:
            serve(Path(flags.run), host, flags.port)
        else:
            path = write_export(RunDirectory.open(flags.run), flags.export)
            sys.stdout.write(f"{path} ({path.stat().st_size / 1e6:.1f} MB)\n")
    except BapoError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
