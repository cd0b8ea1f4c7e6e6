"""Not a Grafana: what the check of docker-compose.yml asks a Grafana, answered from the same files at the same places.

It reads the provisioned data sources and dashboards where Grafana reads them, keeps something where Grafana keeps its
database, and passes queries on to the data source as Grafana's proxy does. So mounts, rights, networks, the port and
the health check are tried; that Grafana itself takes these files is not.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

PROVISIONING = Path("/etc/grafana/provisioning")
DATA = Path("/var/lib/grafana")
PROXY = "/api/datasources/proxy/uid/"
TIMEOUT_S = 30.0


def provisioned(kind: str, key: str) -> list[dict[str, Any]]:
    """All entries of one kind, as its files list them."""
    files = sorted((PROVISIONING / kind).glob("*.yml"))
    return [entry for file in files for entry in yaml.safe_load(file.read_text())[key]]


def read_dashboards() -> list[dict[str, Any]]:
    """What a search in Grafana would find."""
    return [
        {"uid": found["uid"], "title": found["title"], "folderTitle": provider["folder"], "type": "dash-db"}
        for provider in provisioned("dashboards", "providers")
        for found in (json.loads(file.read_text()) for file in sorted(Path(provider["options"]["path"]).glob("*.json")))
    ]


SOURCES = {source["uid"]: source["url"] for source in provisioned("datasources", "datasources")}
DASHBOARDS = read_dashboards()


class Handler(BaseHTTPRequestHandler):
    """Three paths."""

    def do_HEAD(self) -> None:
        """For `wget --spider`."""
        self.do_GET()

    def do_GET(self) -> None:
        """Health, search, and the proxy of the data sources."""
        path = self.path.partition("?")[0]
        if path == "/api/health":
            self._answer(200, {"database": "ok", "version": "none: a stand-in"})
        elif path == "/api/search":
            self._answer(200, DASHBOARDS)
        elif path.startswith(PROXY):
            self._pass_on(*self.path.removeprefix(PROXY).split("/", 1))
        else:
            self._answer(404, {"message": "a stand-in knows no more than it is asked by the check"})

    def _pass_on(self, uid: str, rest: str) -> None:
        if uid not in SOURCES:
            self._answer(404, {"message": f"no data source {uid}"})
            return
        try:
            with urllib.request.urlopen(f"{SOURCES[uid]}/{rest}", timeout=TIMEOUT_S) as answer:
                self._answer(200, json.load(answer))
        except urllib.error.HTTPError as error:
            self._answer(error.code, {"message": error.read().decode()})
        except OSError as error:
            self._answer(502, {"message": str(error)})

    def _answer(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


if __name__ == "__main__":
    (DATA / "grafana.db").write_text(json.dumps(DASHBOARDS))
    ThreadingHTTPServer(("0.0.0.0", 3000), Handler).serve_forever()
