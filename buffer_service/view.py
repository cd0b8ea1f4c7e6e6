"""`python -m buffer_service.view --run-dir RUN [--port PORT] [--host HOST]`: the web page of a run directory alone.

No Redis, and nothing is written, neither to the run nor to its ports. While the run goes on it shows what the run has
recorded so far, but for what only the buffer service itself knows. Ends with Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

import bapo
from bapo.bounded_headers import BoundedHeaders
from bapo.config.load import load_resolved
from bapo.errors import BapoError, ContractError, Refusal
from bapo.gate import Gate
from bapo.records import RunDirectory
from bapo.tokens import Keyring, keyring_for
from bapo.web.asking import view_of
from buffer_service.listening import BACKLOG, listen
from buffer_service.rights import RULES
from buffer_service.routes.web import PAGE, web_router

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
PORT = 8709
"""No process of a run listens there by default, so that a run can be looked at while another one trains."""


class Protocol(BoundedHeaders, HttpToolsProtocol):
    """HTTP with bounds on what comes before a body."""


def create_view_app(run: RunDirectory, keyring: Keyring | None = None) -> FastAPI:
    """The page of one run, and nothing else."""
    app = FastAPI(title="BAPO run", version=bapo.__version__)
    view = view_of(run, load_resolved(run.config_path))
    app.include_router(web_router(view, needs_token=keyring is not None))
    app.add_exception_handler(BapoError, _named_error)
    app.add_exception_handler(RequestValidationError, _invalid_query)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_middleware(Gate, rules=RULES, keyring=keyring, refused=_refused)
    return app


async def _named_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, BapoError)
    return _answer(type(error).__name__, str(error), error.http_status)


async def _invalid_query(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3])
    return _answer(ContractError.__name__, f"{request.url.path}: {problems}", ContractError.http_status)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _answer(ContractError.__name__, f"{request.url.path}: {error.detail}", error.status_code)


def _answer(name: str, message: str, status: int) -> Response:
    return JSONResponse({"error": name, "message": message, "retry": False}, status_code=status)


def _refused(reason: Refusal) -> None:
    log.info("a request was refused: %s", reason)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m buffer_service.view", description=__doc__)
    parser.add_argument("--run-dir", required=True, help="the run directory")
    parser.add_argument("--host", default=HOST, help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=PORT, help="0 takes a free one (default: %(default)s)")
    flags = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        run = RunDirectory.open(flags.run_dir)
        policy = load_resolved(run.config_path).security.tokens
        app = create_view_app(run, keyring_for("the page", flags.host, policy))
        listener = listen(flags.host, flags.port, what="the page", key="--port")
    except BapoError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return error.exit_code
    with listener:
        host, port = listener.getsockname()[:2]
        sys.stdout.write(f"{run.name} is shown at http://{host}:{port}{PAGE}  (Ctrl-C ends it)\n")
        sys.stdout.flush()
        uvicorn.Server(_uvicorn_config(app)).run(sockets=[listener])
    return 0


def _uvicorn_config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app, http=Protocol, proxy_headers=False, log_config=None, access_log=False, backlog=BACKLOG,
        timeout_graceful_shutdown=1,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
