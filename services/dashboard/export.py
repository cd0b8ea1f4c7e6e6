"""The page as one file: its scripts, its style and its answers lie inside, and it calls nobody.

An answer lies under its endpoint and its query, as `keyOf` of static/app/data.js makes it.
"""

from __future__ import annotations

import base64
import html
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from bapo.config.load import load_resolved
from bapo.core.errors import ConfigError
from bapo.runtime.run_directory.files import ELSEWHERE, replace_file, storing
from bapo.runtime.run_directory.layout import RunDirectory
from services.dashboard.assets import all_assets, as_json, filled, scripts
from services.dashboard.endpoints import ENDPOINTS, ask, view_of
from services.dashboard.run_view import RunView

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'; require-trusted-types-for 'script'; trusted-types default"
)


def write_export(run: RunDirectory, path: Path) -> Path:
    """Write the page of a run. Raises: ConfigError when it has no finished step; StorageError."""
    view = view_of(run, load_resolved(run.config_path))
    while not view.is_complete:
        view.refresh()
    if not view.num_steps:
        raise ConfigError(f"run {run.path} has no finished step yet, so there is nothing to export")
    with storing(path, when_full=ELSEWHERE):
        replace_file(path, page_of(view).encode())
    return path


def page_of(view: RunView) -> str:
    """The file's text."""
    style = all_assets()["app/style.css"].content.decode()
    imports = {asset.name: _data_url(asset.content) for asset in scripts()}
    policy = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(POLICY, quote=True)}">'
    return filled(
        title=html.escape(f"{view.config.run.name} - BAPO"),
        style=f"{policy}\n<style>{style}</style>",
        import_map=as_json({"imports": imports}),
        data=f'<script type="application/json" id="answers">{as_json(answers(view))}</script>',
        start='<script type="module">import "bapo/app/main.js";</script>',
    )


def answers(view: RunView) -> dict[str, Any]:
    """Key of an answer -> the answer, for all that the file carries."""
    found = {}
    for endpoint in ENDPOINTS:
        for query in endpoint.exported(view):
            pairs = urlencode(sorted((name, str(value)) for name, value in query.items()))
            found[f"{endpoint.name}?{pairs}" if pairs else endpoint.name] = ask(view, endpoint, **query)
    return found


def _data_url(script: bytes) -> str:
    return f"data:text/javascript;base64,{base64.b64encode(script).decode()}"
