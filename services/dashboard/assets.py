"""The static files as served, and the whole page as one offline file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from bapo.config.load import load_resolved
from bapo.core.errors import ConfigError
from bapo.runtime.progress import Note, progress, silent
from bapo.runtime.run_directory.files import ELSEWHERE, replace_file, storing
from bapo.runtime.run_directory.layout import RunDirectory
from services.dashboard.endpoints import ENDPOINTS, ask, view_of
from services.dashboard.run_view import RunView

STATIC = Path(__file__).parent / "static"
FOLDERS = ("app", "overview", "pages", "vendor")
TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".txt": "text/plain"}
NAMES = {"vendor/echarts.common.min.js": "echarts"}
"""Modules with a bare import name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    path: str
    content: bytes

    @property
    def media_type(self) -> str:
        return TYPES[Path(self.path).suffix]

    @property
    def etag(self) -> str:
        return f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'

    @property
    def name(self) -> str:
        """Import name of the module."""
        return NAMES.get(self.path, f"bapo/{self.path}")


@cache
def all_assets() -> Mapping[str, Asset]:
    """All assets by path; nothing else on disk is served."""
    files = [file for folder in FOLDERS for file in sorted((STATIC / folder).iterdir()) if file.suffix in TYPES]
    found = (Asset(path=f"{file.parent.name}/{file.name}", content=file.read_bytes()) for file in files)
    return {asset.path: asset for asset in found}


def scripts() -> list[Asset]:
    return [asset for asset in all_assets().values() if asset.path.endswith(".js")]


def page_modules() -> list[str]:
    """Module names of the pages, one per file."""
    return [asset.name for asset in scripts() if asset.path.startswith("pages/")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    html: bytes
    policy: str
    """Content-Security-Policy: only own scripts, no markup from text, no other hosts."""


@lru_cache(maxsize=64)
def served_document(title: str, *, tokens: str | None = None, siblings: tuple[str, ...] = ()) -> Document:
    """The page as served; if a token is needed, it sends no request without one.

    Args:
        tokens: folder of the tokens, if one is needed; empty where this machine does not have them.
        siblings: other runs served at ../NAME/.
    """
    imports = {asset.name: f"./{asset.path}" for asset in scripts()}
    import_map = as_json({"imports": imports})
    digest = base64.b64encode(hashlib.sha256(import_map.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types default"
    )
    style = '<link rel="stylesheet" href="./app/style.css">'
    start = '<script type="module" src="./app/main.js"></script>'
    data = "" if tokens is None else f'<meta name="bapo-token" content="{html.escape(tokens, quote=True)}">'
    if siblings:
        data += f'<meta name="bapo-runs" content="{html.escape(json.dumps(siblings), quote=True)}">'
    page = filled(title=title, style=style, import_map=import_map, data=data, start=start)
    return Document(html=page.encode(), policy=policy)


def filled(*, title: str, style: str, import_map: str, data: str, start: str) -> str:
    """index.html with its five placeholders filled; `title` is escaped, everything else is trusted markup."""
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    values = {
        "TITLE": title,
        "STYLE": style,
        "IMPORT_MAP": import_map,
        "PAGES": as_json(page_modules()),
        "DATA": data,
        "START": start,
    }
    for gap, value in values.items():
        page = page.replace(f"<!--{gap}-->", value)
    return page


def as_json(values: object) -> str:
    """JSON that is safe inside a script tag: no text of a run can close the element."""
    return json.dumps(values, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'; require-trusted-types-for 'script'; trusted-types default"
)


def write_export(run: RunDirectory, path: Path) -> Path:
    """Write the page of a run. Raises: ConfigError if it has no finished step; StorageError."""
    config = load_resolved(run.config_path)
    view = view_of(run, config)
    with progress(f"writing the page of {run.name}") as note:
        while not view.is_complete:
            view.refresh()
            note(f"step {view.num_steps} of {config.run.num_steps} read")
        if not view.num_steps:
            raise ConfigError(f"run {run.path} has no finished step yet: nothing to export")
        with storing(path, when_full=ELSEWHERE):
            replace_file(path, page_of(view, note).encode())
    return path


def page_of(view: RunView, note: Note = silent) -> str:
    style = all_assets()["app/style.css"].content.decode()
    imports = {asset.name: _data_url(asset.content) for asset in scripts()}
    policy = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(POLICY, quote=True)}">'
    return filled(
        title=html.escape(f"{view.config.run.name} - BAPO"),
        style=f"{policy}\n<style>{style}</style>",
        import_map=as_json({"imports": imports}),
        data=f'<script type="application/json" id="answers">{as_json(answers(view, note))}</script>',
        start='<script type="module">import "bapo/app/main.js";</script>',
    )


def answers(view: RunView, note: Note = silent) -> dict[str, Any]:
    """Key -> response, for all data in the exported file."""
    found: dict[str, Any] = {}
    for endpoint in ENDPOINTS:
        for query in endpoint.exported(view):
            pairs = urlencode(sorted((name, str(value)) for name, value in query.items()))
            found[f"{endpoint.name}?{pairs}" if pairs else endpoint.name] = ask(view, endpoint, **query)
            note(f"{len(found)} views")
    return found


def _data_url(script: bytes) -> str:
    return f"data:text/javascript;base64,{base64.b64encode(script).decode()}"
